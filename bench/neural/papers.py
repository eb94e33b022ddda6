"""What the papers say of their figures, in their numbers."""

from __future__ import annotations

__all__ = ["PAPERS"]

PAPERS = {
    "oktopk-5": (
        "xi rises in the first epochs and is stable then, for LSTM it rises slowly; a density of 2 % has a lower xi than 1 %; xi stays"
        " below P or not far above it (VGG-16 on 16 GPUs, LSTM and BERT on 32)."
    ),
    "oktopk-6": (
        "Ok-Topk's numbers of local and global values deviate from k by below 11 % on average (1.4 % for BERT, local); Gaussiank "
        "chooses too many at first and ten times too few later."
    ),
    "oktopk-8": (
        "Ok-Topk has the least communication; on 32 GPUs it is 1.51 to 8.83 times as fast as the others. From 16 to 32 GPUs "
        "communication of TopkA and Gaussiank about doubles."
    ),
    "oktopk-9": "Top-1 accuracy of Ok-Topk is very close to dense: 92.9 to 93.4 % for all; it is the fastest to it.",
    "oktopk-10": "On 64 GPUs Ok-Topk is 1.34 to 7.71 times as fast as the others.",
    "oktopk-11": "On 32 GPUs Ok-Topk has a word error rate of 0.309 beside 0.308 of DenseOvlp, 1.39 times as fast.",
    "oktopk-12": (
        "On 256 GPUs Ok-Topk is 3.29 to 12.95 times as fast as the others; TopkA and Gaussiank communicate longer than dense. Its "
        "efficiency from 32 to 256 GPUs is 76.3 %."
    ),
    "oktopk-13": "After 400,000 iterations a training loss of 2.43 (DenseOvlp 2.33), in 47 hours instead of 150.",
    "gtopk-5": "ResNet-20 converges as with dense gradients, VGG-16 slightly better (P = 4, density 0.001 behind a warm-up).",
    "gtopk-6": "AlexNet slightly worse than dense, ResNet-50 even faster.",
    "gtopk-7": "LSTM almost the same as dense, at a density of 0.005.",
    "gtopk-8": "Linear in the size: alpha = 0.436 ms, beta = 3.6e-5 ms a value of 4 bytes.",
    "gtopk-9": "TopKAllReduce is slightly faster with few workers, much slower from 16 workers on; gTop-k gains with size.",
    "gtopk-10": "On 32 GPUs gTop-k is 6.7 times as fast as dense and 1.4 times as fast as Top-k on average, up to 12.8 and 1.7 (AlexNet).",
    "gtopk-11": (
        "VGG-16 and AlexNet communicate longer than they compute; for ResNets computing takes most, up to 80 % efficiency; selecting "
        "takes about as long as computing for VGG-16 and AlexNet."
    ),
    "gtopk-12": "Even a density of 0.0005 has no big impact on convergence.",
    "gtopk-13": "With a batch of 1,024 on 32 workers, gTop-k loses about 9 % of accuracy to Top-k with ResNet-20, about 1 % with VGG-16.",
    "gtopk-14": "With a smaller batch ResNet-20 loses about 0.5 %; with a larger one VGG-16 about 6 %.",
    "thesis-5.13": "SGD converges slower on 32 nodes than on 8; Top32 slower than SGD on 32 nodes, but not on 8.",
    "thesis-5.14": "2 of 512 values are enough for the convergence of SGD, on 8 nodes.",
    "thesis-5.15": "Computing and communication take about the same time with dense gradients, so that 2 is the most; 1.5 times as fast.",
    "thesis-5.16": "4.6 times as fast without loss of accuracy, 8 nodes.",
    "thesis-5.17": "2.5 times as fast, 8 nodes.",
    "commlib-6": (
        "On a V100 exact top k is very slow, DGC much better, MSTopK negligible (d from 256 thousand to 128 million, k = 0.001 d)."
    ),
    "commlib-9": "DataCache reads in less than a tenth of the time, and training is about twice as fast (ResNet-50, 96 x 96, a V100).",
    "commlib-10": (
        "Top-5 accuracy, 2DTAR, TopK, MSTopK: ResNet-50 93.31, 92.68, 93.12 %; VGG-19 92.19, 91.55, 91.94 %; Transformer (BLEU) 26.74,"
        " 24.42, 24.16."
    ),
    "commlib-throughput": (
        "Efficiency on 128 GPUs of Dense-SGD, 2DTAR, MSTopK, in %: ResNet-50 (224 x 224) 43.5, 91.4, 90.6; (96 x 96) 20.1, 56.7, 70.5;"
        " VGG-19 25, 66.4, 80.4; Transformer 16.5, 61.6, 87.8."
    ),
}

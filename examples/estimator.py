"""A classifier in a Python program, as with scikit-learn: text in, labels out.

python examples/estimator.py
"""

from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.pipeline import make_pipeline

from sparseallreduce.linear import LogisticRegression

LETTERS = [
    "cheap watches buy now",
    "win money now click here",
    "buy cheap money online",
    "lunch on friday with the team",
    "the minutes of the meeting on friday",
    "notes for the team meeting",
]
LABELS = ["spam", "spam", "spam", "ham", "ham", "ham"]

model = make_pipeline(HashingVectorizer(n_features=2**20), LogisticRegression())
model.fit(LETTERS, LABELS)
for letter in ("click here and win watches", "the team meets on friday"):
    shares = dict(zip(model.classes_, model.predict_proba([letter])[0]))
    print(f"{letter!r}: {model.predict([letter])[0]}, {shares['spam']:.0%} spam")

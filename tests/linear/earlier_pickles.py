"""Pickles of estimators that earlier versions wrote, what the models said of three samples, and their weights after one more call.

Each is a base85 text of a zlib stream of a pickle of protocol 2, written at commit a3fe6e4. All were trained on the samples of
``samples()``.
"""

import base64
import zlib

import numpy as np

__all__ = ["EARLIER", "earlier", "samples"]


def samples():
    """Forty samples of five features, and their labels."""
    X = np.random.default_rng(0).standard_normal((40, 5)).round(1)
    return X, np.where(X[:, 0] + X[:, 1] > 0, "bee", "ant")


def earlier(name):
    """The bytes of a pickle, the scores of the first three samples, and the weights after one more ``partial_fit``."""
    content, scores, weights = EARLIER[name]
    return zlib.decompress(base64.b85decode("".join(content))), np.array(scores), np.array(weights)


EARLIER = {
    "average": (
        [
            "c-oCtYmC%X6dv{g%K(Ci$^t5ix`V*D%PPWxba2rTx?8mf)(6y1=kB!9Y3H=JyNtRD!oEaT#pUfA1#vMd#zcH=(#C(r_`{zjCjL+pH4^`lsOR2xX4f?)-ejij",
            "IrpCPoyR@r?5@$hlID6uvn-e7eVwE&(<YjmCLT458g*PRty`Ms5ii-{6ilS*GAX#k^GwH1LSpG2n9>V1DWxWnNLVYOHY+Sx^}{cV+E+xB7O2Z6;-$>Ozb=!i",
            "rcH^flM;pcL1iiu{Zd||1g0u=_@VjKfoXiRg-~qME~qYJHyG2D2Bdnrfmkg9(_=!>DH5CdMMxrH8WYh?T&+N0#-NhK&zweeL-ou@3Ct9e(GhKzY9b1l)%kO+",
            "Qi~MoSa1=ZpM&o<=c%@%>V{^cpxMZ{2pNdSDytrKN+pB^bB2^lklL+TCK`YqQM+7CXD@JZRycQ*tz-P4r)w5byNE`8bRNtdj4YwdutFIw;ckdx0rQmU%m%CA",
            "xF$7<aA|B+p4gsA%W#>*KdIpoE$_kQ;uK{je!H5TcZvv(`D(tH;HLLzE+@GZ8i)8XbWP4dEemi5bGPmki?C4QB6z6P9%2>@3X3FV2J@6}QB&m{xFU9gU9|*b",
            "slt_FJvS%L6cw)0ZNFG5r&Zl?Nt#R0Tvsb6RhQ_Fjb{5gO~T@6Thh))T)0|H^uaYc9?KKmOA?#CBw>j%g+&pr<zBMT({>A7*ALgr&@=!k8J4ERDPm0@+z<=Q",
            "({c&VE#o=3wH1~R4GzEx8PX}SmdjcPH%gKu&J^p!1`5r&A!CU$pE;cw$9&85v3SQnXfaUVN*P)y+?3;fQHxr^HmRS-aNcYzHaPZG1_HW8hSdyEeIKkbA`D%t",
            "p^af!E5ka(U@+~Q|H8%p!~}&~Iffh9UcSOFgh?+onO44Pt4~<ZPzf?*C~SyPVeE*F3F#BKEi0T~zioc=$ZDmY2by%L&|ZPMkwLv(hC3Kk1ltc;V;#e=j`=6(",
            "3qA@@*KG|)h4B4w|B~>z+TdLHp^&~l9Nrjy9=scj3c>Kz;hu-Wf$(^^S1`g4(mPTQhffP|CquPKhRqbj9M8h)g;$}YqQ8^rmt?q$>+gfRBke4`!r^eFGdSB8",
            "91afzV{i|XC(E#f!o4|uH`J2r@FE0TH~+Zy)5rct70YQJNve0p=aR4u)%L=DDefANl9C6CSf|YW2ik68IXb&?_h*F@Jzw@o(|+ZNUZp=!vF1T$%|kM5j|0CW",
            "vPQtoTiU}zT|2_Da5xwXKUuXrIGFDZj|5{K%ffTPXW`+V;2<)N%?>{f&Riax3XZaEPh1wfzw6fEG@7q6^B<N$qmaw-D;!-=5A=%mJkw5O=!&%$BJFL=mj{C9",
            "gO@i2@9k{J1jCI_VzAD%&CM(fM%scyPPjiD5m4VV!52Y)dt>;nu%gx57VPyf)L<~hrVNiz*qP(C!t;wBSQV{Brq!0giM5s@t*a;I&%(@j`Yg#*vnQOGJ++xQ",
            "d6F3brqh+dqd;@q*KsY+gOA~vJ~2GdogMq}!uG3v+j=eU7UOY4oY0dU`{Qui+0Jjj_IqJhisR>Pq@2ynCIdGwn)wx{<uFO$(X8<O?}a}*8hu`3dNi#6d3a1r",
            "_(~Igr<%M%zG?a5rV<t(qWSEVwJCfyr<<FbTiA2WQg~dd_@<Zn<_Q^|jD52^@=YpHU73GA=ltsldzdetl3_1}eK`t!d!WA`2DnoU?8J^+R$*{E3~h&}|LX!^",
            "e=%7DO_P$N8_C=GKkUb@{Y)=B8znzy!7z3a<_^ojTlL(yJJ@~XQdCXXee7;!cwXXhh^f8~FT@1&q{`19ka$2ip?d5^i9?Twcxps48pcDx^4ep~0Xy2kUO1HE",
            "6l_i<A7genD{MGvZDd0PZ<NF$I)x+Sqs5H4lliu(vmhVMuK(`DKF+F(0}98g+l{GN;hNFS-!L|-PdHHMJ4+5G5F8(u$<Pv3N}0fyvckgF_jWUSJ)ah+X2Hu@",
            "Vbl2w=h*}k4H{*%PW5mYfmg(Y!3qi+Ckn2XH<74TI{2$tnJ3IdTv(O)+BlO>Dn#@6%<y_Iyus_!BylG4PDsk^NrD*p%_uMxBl7Up5C>E#pJq3S0(Npd;PWQ&",
            "tMNOP6@H3357#we=;0#XmL|_a)sv?so<<W{82@)9Kc{It%<;ShqnL!OU1Fa&Bi8x3^xr&xh_(",
        ],
        [-0.38341263920615837, 1.325818614519851, -1.2055997762101565],
        [1.836383903848261, 2.5176442270916852, 0.06721046673532378, 0.20485580564207517, 0.3377825236311194],
    ),
    "ftrl": (
        [
            "c-oCtYm5{{5Z-$ME+8nVh^V0G-65=ZA}<B!c&;)s;wUhpIL^-Y?TpOMY|Zol3!L)0;|^3FCn%@#R)UF$_z0pB?f&IY`Q;xIqdzq9hnScc6BDiO*<BD~;v~D>",
            "Q`J@V)uXFsQ@tIPtS};$=Y=F6+a%+;KC!|KiKtt&Xb?sj+q0sGMCnI^f{RpJCxwtiksJ7FNVRT;x-O`1G3ryPly@IAWR<bgfB0qG{3!{g9U8OB(%g~@zn%Qc",
            "7><-qmzu6mNobQ2g{EF(5EA23-l7Bs8I9ru4Lukv4|@p3cm0AH3ic4mwqhE<HO3I!Mz({XJpySbArylm@o8Lyp-31k4zD4hRUj~|&q(8I&Z4$sM(%n7!_{;m",
            "Vy!b>gag+u`MJSpKne{!7=iL5aqml>=?A9mSUxHmiHvKJfxx`78PT9rLVR#tpD_xlYb?)2PcSrQXK2}C1J`GjPY;M^Kng~-<q@-!STx2c!l>TF6Dm9`lwq`t",
            "N0Jn{!MH~F;1z<<rA`rUtaz0te&o_J+@#4@>V(9~M=(aMGlt=NX!-e|h~PxfZdOy$^|e+gNg;)?eNqfVlMB$wEqFo%)((nA7^g`UGUw)6;uahVw`#^v5vkat",
            "t|>WiTO|yB%@a(j3Ad|F(w$1lm@wY<<6^0tG3_8E8L7bvL#v!NLt+O$x*gjz4HJ@MX+NKE;SM#`4R_iomM3<UCcfCDVWLqdvIuv{D0vuZza8%Gfo2_AwnM89",
            "lUmd|wZ0qfsVL0TatY-o%VJzM6{hs{ZikEx_qM1FQrB!~(=<&TrZ%cWD75GLoQcL55p?04h^??E@?H7CeGb~2s>A&hrsZT@%%WBBT^i>xoztBOj>JC0K|nKg",
            "m?Z!;b;AQrf}wLJJSZ^C)?p4}aD?^6f8!(n)D(q>B!)@itbF)+<%&&x$5i<=)K*Xgstz6IQka*MDKL|}5W)N^qy+-fLLC+fNR8c)b>;|5cc!Y(f)0Lw9V^XA",
            "t1~((B)+N2f`^5PM|4<BLCqOWvS3K336ECwFA@4R9Uc?<(diyonpl`E6n)HgW;<8h!w)KK%frk0DZZ0!<42VHr%mPO*cWUEJEQQEnf24z)-wA@VY~P{d@noG",
            "IhUPP;BjGE*Wn2YPv&Gb*E)y^%c}O53;Qc{Fr@u%cq*|j%6TR`cQ5PXTlk(xft5nr(>gpuVO37vFtZc}vZukbi~socu66&TDdwz*q|K!jxipw)v<seVk%5UQ",
            "DMetZjq=S8!eRuuDok6z%<DiZmC>2NoGXHKitS&-j`6eXbKaxy^XxQxgB|AsD|x@7^W7WS*%htqLxsJk)w6!ydpG+;;iuWbJUVuqeTHvP5WYD&xD=jGk|g>{",
            "1go>kpC$LU6FYvF*Y;BQ1UT@r$_4nU=esel%f^sg`v{6v$i9Fa=uoOah6J*LXW3qUcJw&bzk#1p*h${c-hCWVzsWyPye77*jt}tD2%ewd@6TX++u3QpPnphk",
            "ujOa>0Pq6}gaUA+1Emn>;x1TYw4&CQW-$bsCy#HIO~Uf2*o)4OYg?wRt*u?It*}<Bf?Ov+mUUQP0l6Uo*-|U-RL8&9kyov-QK0G4;ROmW<|u6144Zpki@Z+`",
            "&b}Zlo3M2iY+D80|5YQ{$XzkAGNcsPPI{sIhaQ}h+q<AQsSnA5K5W;b?|K0i-j1yDqyF007Y`nl36fe&%eG@2BW2jB$vUl2V;f$o5U?UmDgUx22c{&{#9q-P",
            "^n{2~yEJD=R{1`0SEf1=T^L8l?k?EVA}KfpN-@rjy;<eVwpsIV2qqJWc*LgApREQ{wmva3V&ApJpm{a>(68&hk*r2JZ?FdU)s8!ZvdXxR4m~H>;sWF3wpW(|",
            "EJWCUNvA+daEQi2;cHoC!p=d51-(g*WomiwI>Or5{Nb1Q&5%s=GJ0o5*y-SansUUQ6LY%|T6q_VW_45!WR;5*Bg3o8YRoq-G36%#u_8H~-|T|7jO(vf=OXW*",
            "W{kK(ksu#R5>s^|4~P3CplXM4*N`M(M=m9N^cDPC{*GpqpOO|YZC&<tAypjHuKehzNgmf^8C}l8{J*WmIm?o1u6)?QJ6MEbE@2}*p*F_3%s+nxQz!",
        ],
        [0.0013138611270439998, 0.7911243976795879, -0.5742797868886779],
        [0.6875473863548278, 0.7772644584655026, 0.09669141061573074, 0.07117519460965212, 0.1608492797700681],
    ),
    "fitted": (
        [
            "c-oCtYitx%6yCm|Y(b!aAcDw4U0&s-rOIQfP!|~(aJ4WfFwD;0?j4w&*)wyeu)snQN?TNrs)^_yBg7CjMoIV~QA~C*@sEiKF&Z^ughZnl{9#N?czEueeb7<~",
            "lkDuBbM8I&`_4J{o9U=DytM9mM7J!LBz%K3Sf)*Mw}E)fOzF&Vy#~Y5J&$<dRZh}Gs}Unfmw2A(*kK4w-v<?0sEnwUp-{-04^>fVeB&>FOjtHMu*`$%XsB?h",
            "!|>K-GR?FZaSf7YP}8jrLZhEf=#0Q1wVKaht_6d|WDB9#rk&JW?yePX-DeIAQEPGN85BWV1i~~hq?{D7nV*6>Gz{jG+li|u2@LH~!}u82nL#zr+(}@V91fP~",
            "J2VsFz+G~UT7?GYSTI~sN8r#F9?f<%gX%Vh8G&K%LI=XKGMdMnbQ;mY$R2eRTHAHYL>`zJt<BX9K7jhD^vN-Py(t!YhHeq9jp)qB9KxvXfCuCJk{K8+vJsR7",
            "#;8L$11sscCZj31yTB<yY|msF7^{d!MqQ#OJQyces6+AD)$N3nLU24~_sAhZe7o)nlgnUyk64C@i95K<y*PuX)o@ZNn4pLdqT<?iVkRkriHcgs^W<C1)Px7_",
            "E2P0LF~O2*FbOkQTU?GdxZkk-R65h38IDUDL<HS+^-NfEiQ(8t+c#JkCI{2Pb|Ub?6gkuhQw>~}AchwvHXnpxnp(kY2oH!XS(s^i9z1vu9*RMv3#P|lMntZV",
            "D?4FkAz*@K(ztGxXvNkAFuSL_3mRfDCn8sgSc_q<qA2oExmvDeFfZOir>Wz3(m6SvTfQH!ci{)~Deku*1`jiMBrfuzrSzn2GCzUkY^0N^z`l?opr#l+$^q4M",
            "!ecbR(AETtIEKYBSb`WR-+ko`yu?ioF<2@v%;0myl|L)>8&ozg5LZ>{A0&>dIR=k2cp@%JpamzvgJnfX%Q>W$7(B@#Rd+&^F5x>(EgsI$^5*=p-0}31u)MIj",
            "V9IwCU9f_0@l*^}GLYkHjc6FsropOW{M9_Z5`#57K9W8NYl9t@@IXg$?~Gg{&CGu+<zF{*hx4cK_fh_olzVG(em~8f$am%UNh@+EHslZGkLHi(PD+a!>z76H",
            "ALfrr@HF2$7K3LPJR2A7ToMosT8jYIaRBRMpb7w;up!u<_o<xg%^et)>&m^6JDvL+p5yVJkHJO;o8sb-X=&FHq6V84kw1z`=eQXSv`w&O6X=ou(@8wJCReBi",
            "l6DLlZV`8gqbwR(NJK=YgbN6sPkzuW2e)a9N*7nR9{G3d7y(d3(R9P`Q8zM>R0OJm)i;0^45-SQSZ^vqABCZ`Y-@l$Fyg9h3ayPwKNrN8A9{};JJbp*3#o{(",
            ";IU8pC=_;7n!oXfFZo0vLBt{k1E;Lrbp?&^ZPVb&l8!F@`oep{RV@U@WB{e<bWl{Pj$amTUN97DV_Vw6x`A7c$<Y#2O`iw!qEg+g-+0G~q%nu-7O<$))Z5A@",
            "`+<OGke%jXYlANb6Fo-K9<<BVLb8*to-om^6;*P3RQl_t*N+HWa_%TQ#k+v$p3vn?7Iv!jw}vy(w@Xon_Y1_$yMq!H=_DZABLEdU%WNk>>GqUMKf0g4RLQ+j",
            ">DS<Ni@k1ov4{{IO8@swY2`jeG}O&5?1UE-KTdg5?$5%32qkhQ#SZ+@`{&~6Z?Ds&La9Pcg>F@7pPr%EC!G<By)jL_%te8g8-ij3oLlj>81||A((5NBUPW3i",
            "G{xFhG`%Y#U`1zr)y#)J#S&6194*&~mMcQB2nXpdh3-~pwukO1<HhV;F3jmr=sty(=yheGo71b}^uBAnzHEK{oZHju5%i|E`CD$Km+!bV0KKc9p1qac(i?yG",
            "h6?m%t~?&PGkS;m&@19adVdC=4E^c7n1z=(y=qSHn@J1aKXdGh+tYhl(3|r8g@LL!@q+>AT^qbPbSu4UeyT`s#?C8i?~LBzKJ<!sk=~V{xBJsOl7&||y&6vM",
            "eCL#NEoUy>p5D=bUi|j~=;elY4@7U>`2px%Z8_gjpf~-e&*t74z1}|big@>y=alIYU5IVrdlFv74<-INfUmFD<k5b-;XgE^jH>",
        ],
        [-0.1473019133805787, 1.6104899751659627, -1.393591197547959],
        [1.4795800098781904, 1.7793688799508092, 0.19038337874067143, 0.12789177818882275, 0.3622946377808556],
    ),
    "lossy": (
        [
            "c-oCtTZ|M%6rFv{0>e{YA}$Ij>@4CiyC4ri8^pDRfdNOwRvvA2ckOgTPxsvJ>V-i^7j%~$Ux_Xu$_JVl{4gepi5i5sNq6E0#t#z{`6PasXrhS{|I}O6^MExb",
            "*2i?!xpk}V<J7$~+^+j&;`x-=wnvRXry1LFDDg7XXI6<Y*Yh*FO?;pFsa--+phb`RzU4Y8Nc5h7wkouzmG(p;VfRCaEG=ID<ImmO?~Rc@=#&%nq0GdeL5r!D",
            "!>FgzGK1up(uH79HVC88rF7zg1k8mgVzZ6cIhIpYJuaSVPEn>J>gy(2YEzh22TE><IxHwb3V|v7h#~5cB8BNSC520kFx^yr>o|oOxm2t|j;R(}0W)|1)S+}B",
            "!dx3>q5d44J3^*9uBw~F!GmU_U=|9{9=oFY%q^GEESOVM<{>&nYzrO0h^T`e(fI^!k)@08@Nrfs`Z}?xI!Fl%FnBO`EcS$P$BGr0rzCM%#B-0pd}SJU!7jR<",
            "#mo{cs5@m)$G2Do7Ru7KdO$hMOpg-7hg)-P$_!k4#4+3w+Q>t;D3=fsI7&PLc?@o=2{nw6=K2&C;|?Bm-7S^i_Pm(euJ1#)*yck(kQcB-tZ3P{Y;^7pS-M_#",
            "j=O<-9A;rc?rfPhON6oEFs59ErMaXs9bvUZijKts0|T*4cY;#6l2LWnqnT1*GmCg0siaho>aK$U3Uro&<?*(ZW5iOpE0-97yLD7EsP3nz!zU?Np|tUQ!%9Ib",
            "8*}3HLC+|p3($KCRu$l$bgnIz9D&vK0}WOwqh8F`!Htlqjh%uu1<0mz9pbDl(3j8Wcm9n-{Nxf0`n8(5LRrN%#E8C<CQaJ6t`(!B`GvJ6+Oe(x_c2(n#c`lk",
            "kvd48fWih@`t8Aei?XLT3MS|-9aLeXx!e?vZZgsO`wOtSZv7TB%Pq*_&W<1)pT9dCi$0N}bI}*kaI$w#_?gsrbI!tPn|DQ@(<T59a629>fW%;{Cdkozjw)=E",
            "r7M4FKP-Fw7ePX`?78Bx!$UjwU;VTHf7A+%_%x;Nt?Q*=JDOaDhtt9>pCN-_AlIqPz3JW|YP&k;_9ODd_o?g2(*wT?Vl{EO5s626Bz6>FXFU?RI1(FhbNFTW",
            "X?u97JBZGQ6VW);_C*s>O$#R)u1A-n%iYlh6kfO?La>VmWOo7b4EAV2751jZBM>F$F<JVxy6xn5e{={;Lr0+?OJ84Fvg6w;hXu)w608*lJf2GgN)N8nJ$}*X",
            "S-rHUjP#=<;8R}G@SDwKv)MlW-P8+DG+cU;yR@$WPjQ#JMnH*OY8uEbA3YGg!3Lra4x#a9!nfN>;Y9dx_<nOwe}6O@jfbP*x$w=F!|*hB?U@4XXK+Ak+;@=Q",
            "cc=hrJ%rE3_oZ9cZN2$B=U-nS{9vsBIs-#vKu^HnC=^A`Obg4SS5d({2-ZP3{9l~G(r5A7o}pz|H&X-R7mi><v8zyu`65K%<l4;cR?vB65y~pj^#JQ_1>C%#",
            "YaI=ADAxhZmny0m<V8afKvT`j3yWhAwfwv}wUuyD{&*3>;>xNJqy>U?vK$~YhGa>;xMm$MbzNekO)(fpu>ijHP4X<F)9Xbwa4elu>6k2Ses9TDuFzSh4OE)F",
            "(d?3?zBM0>aWQ|B*y8jfWfz|a9B(yHZY|{ngCF=Dwpwe!FvpXke=%ai^Ju`kE5}vrsd4M8pm(Z|?GdWEgvp;CZ*WDA7#4zRqp7^ms@yXhhc$&SwuGX0QsRp)",
            "He7`hVmmG@BR~zu^-6G3md>BK_Ms<V@WnfybeV;kFXfflldj?L%W>KoE*daW6XrI`kTpc(bdI*@Fn^M~ncY+I9XB**p*ohI+_Re+wY(tLjUr^lEBQbpL?pld",
            "zW`pvUdtN>R?OFOoq?A52fV=W3I",
        ],
        [0.3061600890925289, 0.7305331383219654, -0.4096139173108313],
        [1.583602319772687, -0.18155418303535653, -0.013404369445962405, -0.022527211415405757, -0.005113019674603396],
    ),
}

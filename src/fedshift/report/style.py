"""The page's style sheet, with colours for light and dark screens."""

from __future__ import annotations

from collections.abc import Mapping

from fedshift.report import plots

_LIGHT = dict(zip([f"s{i}" for i in range(8)], plots.SERIES, strict=True)) | {
    "ink": plots.INK,
    "grid": plots.GRID,
    "paper": plots.PAPER,
    "faint": "#5c6773",
    "wash": "#f4f6f8",
    "miss-ink": "#c8372d",
}
_DARK = {
    "ink": "#e4e8ec",
    "grid": "#39424c",
    "paper": "#14191f",
    "faint": "#9aa5b1",
    "wash": "#1d242c",
    "miss-ink": "#e2665a",
    **dict(
        zip(
            [f"s{i}" for i in range(8)],
            ("#57a9e6", "#f08c4f", "#4cc38f", "#d77cc0", "#d0b03c", "#9a97f2", "#ef6a78", "#8fb2c1"),
            strict=True,
        )
    ),
}


def _variables(colors: Mapping[str, str]) -> str:
    return "".join(f"--{name}:{color};" for name, color in colors.items())


STYLE = (
    f":root{{color-scheme:light dark;{_variables(_LIGHT)}}}\n"
    f"@media (prefers-color-scheme:dark){{:root{{{_variables(_DARK)}}}}}\n"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,"Segoe UI",Roboto,sans-serif}
main{max-width:68rem;margin:0 auto;padding:2rem 1.25rem 4rem}
h1{font-size:2rem;line-height:1.2;margin:0 0 .4rem}
h2{font-size:1.3rem;margin:2.8rem 0 .8rem;padding-bottom:.3rem;border-bottom:1px solid var(--grid)}
h3{font-size:1rem;margin:1.6rem 0 .4rem;text-transform:capitalize}
p{margin:.5rem 0;max-width:48rem}
.lead{font-size:1.1rem}
.note,figcaption{color:var(--faint);font-size:.88rem}
.note{margin:.25rem 0}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(11rem,1fr));gap:.8rem;margin:1.2rem 0 0}
dl div{background:var(--wash);border-radius:.5rem;padding:.6rem .8rem}
dt{color:var(--faint);font-size:.8rem}
dd{margin:0;overflow-wrap:anywhere}
.scroll{overflow-x:auto;margin:.6rem 0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.4rem .75rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--grid)}
thead th{color:var(--faint);font-weight:600;font-size:.88rem}
tbody th{font-weight:600}
th:first-child,.classes td:nth-child(2),.classes th:nth-child(2),.facts td,.facts th{text-align:left}
.accuracies th:last-child,.accuracies td:last-child{background:var(--wash)}
.error,.missing{color:var(--faint)}
.error{font-size:.85em}
.classes td[style]{background:color-mix(in srgb,var(--miss-ink) var(--miss),transparent)}
.facts td{white-space:normal}
figure{margin:1rem 0;overflow-x:auto}
figure svg{display:block;width:100%;min-width:36rem;height:auto}
details{margin:.6rem 0;background:var(--wash);border-radius:.5rem;padding:.5rem .9rem}
summary{cursor:pointer;font-weight:600}
pre{overflow-x:auto;font-size:.85rem;line-height:1.45;margin:.6rem 0}
ul{padding-left:1.2rem;margin:.5rem 0}
li{margin:.25rem 0;max-width:48rem}
@media print{details{break-inside:avoid}section{break-inside:avoid-page}}
"""
)

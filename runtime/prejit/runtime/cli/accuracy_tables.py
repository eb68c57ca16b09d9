"""Tables of a bundle's accuracy and product forms."""

from __future__ import annotations

from collections.abc import Sequence

from prejit.runtime.base.wording import table
from prejit.runtime.format.bundle_schema import Accuracy, ProductForm


def accuracy_table(found: Accuracy) -> str:
    """Return a table of what a bundle's dtypes cost in accuracy."""
    without_file = {"sampled": "text that the model generated", "random": "random token ids"}
    text = without_file.get(found.text, found.text)
    unit = "" if text == "random pictures" else "tokens of "
    rows = [("measured on", f"{found.tokens} {unit}{text}")]
    if found.float32_perplexity_millionths is not None and found.perplexity_millionths is not None:
        exact, stored = found.float32_perplexity_millionths, found.perplexity_millionths
        rows += [
            ("perplexity in float32", f"{exact / 1e6:.4f}"),
            ("perplexity as stored", f"{stored / 1e6:.4f} ({(stored / exact - 1) * 100:+.3f} %)"),
        ]
    if found.logit_difference_millionths is not None:
        rows.append(("largest logit difference", f"{found.logit_difference_millionths / 1e6:.4f}"))
    if found.top1_agreement_millionths is not None:
        rows.append(("same most likely token", f"{found.top1_agreement_millionths / 1e4:.2f} %"))
    if found.cosine_millionths is not None:
        rows.append(("least cosine of embeddings", f"{found.cosine_millionths / 1e6:.6f}"))
    return table(("accuracy", f"{found.weights} weights"), rows)


def forms_table(forms: Sequence[ProductForm]) -> str:
    """Return a table of the form of each product and its gain, with the measured machines as notes."""
    rows, sources = [], list[str]()
    for each in forms:
        source = "not measured"
        if each.measured_on is not None:
            known = f"{each.measured_on}, {each.date}"
            if known not in sources:
                sources.append(known)
            source = f"[{sources.index(known) + 1}]"
            source += f" as {each.like}" if each.like is not None else ""
        times = dict(each.nanoseconds)
        own = times.pop(each.form, None)
        other = min(times, key=times.__getitem__, default=None)
        gain = "" if not own or other is None else f"{times[other] / own:.2f} x {other}"
        took = "" if own is None or each.like is not None else f"{own / 1e3:.1f}"
        rows.append((each.product, each.form, took, gain, source))
    head = ("product: rows x inputs x outputs", "form", "microseconds", "as fast as", "measured")
    notes = (f"[{number}] {known}" for number, known in enumerate(sources, 1))
    return "\n".join([table(head, rows), *notes])

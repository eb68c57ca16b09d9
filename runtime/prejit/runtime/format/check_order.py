"""The rules by which a bundle is read, with the policy's, in the order in which a load comes to them.

The numbers are those of docs/bundle-format.md and docs/how-to/trust.md, whose lists are generated from this
table, and of docstrings. P1 to P6 are the policy's. A number with two rows is checked in two steps. No code
reads this table; a test checks that each function is there, has this number, and runs in this order.
"""

from __future__ import annotations

from typing import NamedTuple

from prejit.runtime.errors import AnswerError, PrejitError, RejectError, UntrustedError


class NumberedRule(NamedTuple):
    """A rule, or a part of it.

    Attributes:
        number: its number.
        text: the rule, as the documentation has it.
        functions: what enforces it, below `prejit.runtime`.
        error: what they raise.
    """

    number: str
    text: str
    functions: tuple[str, ...]
    error: type[PrejitError] = RejectError


_CHECKS, _TABLE = "format.checks", "format.checks.program_table"

LOADING = (
    NumberedRule(
        "1",
        "`oci-layout` has version 1.0.0. Directories and files are opened relative to the one before, "
        "without following links; only regular files; nothing larger than its cap (`index.json` and the "
        "index 1 MiB, manifest 64 KiB, config 16 MiB, others above). JSON but texts and the model's own "
        "files has at most 524,288 keys and as many lists and objects, which take 30 bytes of memory for "
        "each of theirs, and above 4,096 of either 8 bytes for each.",
        (
            "format.layout.Layout.read",
            "base.typed_json.check_amount",
            f"{_CHECKS}.oci.check_layout_version",
        ),
    ),
    NumberedRule(
        "4",
        "Every descriptor: sha256, the expected media type, a size under the cap; the file has that size.",
        (f"{_CHECKS}.oci.check_descriptor",),
    ),
    NumberedRule(
        "2",
        "`index.json`, then the bundle's index: digest before parsing; a known format, canonical, media "
        "and artifact types.",
        (f"{_CHECKS}.oci.check_index",),
    ),
    NumberedRule(
        "3",
        "Each target: a name and a requirement, its axes of the right form.",
        (f"{_CHECKS}.oci.target_of",),
    ),
    NumberedRule(
        "5",
        "Manifests of all targets, and the config of the one that is served: digest before parsing.",
        ("format.opening.read_manifest",),
    ),
    NumberedRule(
        "6", "Manifest: media and artifact types; known layers.", (f"{_CHECKS}.oci.check_manifest",)
    ),
    NumberedRule(
        "P1",
        "The first rule of the policy whose names fit the bundle's name decides. No rule: refused.",
        ("trust.policy.Policy.rule_for",),
        UntrustedError,
    ),
    NumberedRule(
        "P2",
        "A bundle or a manifest that is revoked is refused.",
        ("trust.decision._revoked",),
        UntrustedError,
    ),
    NumberedRule(
        "P3",
        "Each attached signature is parsed and verified with the keys of the rule, or a keyless one with "
        "its identities. It counts if it is by one that neither expired nor was revoked, and is about the "
        "bundle's index or about this target's manifest.",
        ("trust.decision._count",),
        UntrustedError,
    ),
    NumberedRule(
        "P4",
        "As many different keys and identities as the threshold must be left.",
        ("trust.decision._why_too_few",),
        UntrustedError,
    ),
    NumberedRule(
        "P5",
        "As many of these must have signed the provenance and the list of parts that the rule demands.",
        ("trust.decision.missing_descriptions",),
        UntrustedError,
    ),
    NumberedRule(
        "P6",
        "The bundle must be the current one of the rule's channel.",
        ("trust.decision._channel_reasons",),
        UntrustedError,
    ),
    NumberedRule(
        "7",
        "Config: all of the forms above, in itself, the programs and the manifest; `device_count`, if "
        "present, equal to the mesh's size, and present if a mesh of more than one device is not of `cpu`; "
        "kernels for `cpu` only; all programs that a decoder, an encoder or images must have, and their "
        "kinds only if the config has one.",
        (
            f"{_TABLE}.check_config",
            f"{_CHECKS}.seldom_parts.check_seldom_parts",
            f"{_TABLE}.check_kernels_layer",
            f"{_CHECKS}.seldom_parts.check_library_layers",
            f"{_TABLE}.check_chunks_layers",
            f"{_CHECKS}.seldom_parts.check_recorded_layer",
            f"{_TABLE}.check_packs",
        ),
    ),
    NumberedRule(
        "9",
        "Before the first program: the digest of each kernel layer and library, its exports (of a library "
        "its architecture too), and only then the dynamic linker, on those same bytes.",
        (f"{_CHECKS}.layers.check_kernels", f"{_CHECKS}.seldom_parts.check_library"),
    ),
    NumberedRule(
        "8",
        "All layers and configs of all targets: digest. A reader may compare all chunks instead, or the "
        "[kernel's digest](#fs-verity), and skip a file that it hashed before and whose device, inode, "
        "size, mtime and ctime are the same (chunks say nothing about a file's sha256). It may do this "
        "later, and for the target that it serves alone, if no byte is used before it is verified (by its "
        "chunk, layer, frame or the kernel) and no request ends before all are. Every request after a "
        "failure is an error. Who may write to the files must be trusted until the bundle is closed.",
        ("format.blobs.Blobs.begin", "format.blobs.Blobs.verify"),
    ),
    NumberedRule(
        "10",
        "Weights: the header lies in the file, and has at most 16 MiB; tensors lie in the file, apart, "
        "aligned; every tensor of every weight set and of `weight_shardings` is there, split evenly; an "
        "encoder's layers have the same shapes.",
        (
            f"{_CHECKS}.layers.header_end",
            f"{_CHECKS}.layers.check_weights",
            f"{_TABLE}.check_weight_sets",
        ),
    ),
    NumberedRule(
        "11", "Chat templates, when one is used.", (f"{_CHECKS}.seldom_parts.check_chat",)
    ),
    NumberedRule(
        "12",
        "The generation config of a bundle with a decoder, when it generates.",
        ("generation.options.check_generation",),
    ),
    NumberedRule(
        "7",
        "When a program is used: its arguments and results are spelled right, and the mesh splits them "
        "evenly.",
        (
            f"{_TABLE}.check_array",
            f"{_CHECKS}.call_programs.check_arrays",
            f"{_CHECKS}.call_programs.check_tree",
            f"{_CHECKS}.call_programs.check_static",
            f"{_CHECKS}.call_programs.check_programs",
        ),
    ),
    NumberedRule(
        "9",
        "When a program is used: digest of its frame, decompression bounded by `raw_size`, digest of the "
        "result, and only then the deserializer, on those same bytes: XLA may crash on others. Before it "
        "runs: it takes the arguments and gives the results of the table, in number, dtype and shape (on a "
        "mesh: each device's share), and donates none that the table keeps. If XLA does not load verified "
        "bytes, this machine cannot, and the bundle is not damaged. Recorded files go into a directory "
        "that only its user can write to.",
        (f"{_CHECKS}.layers.unpack", f"{_CHECKS}.layers.check_signature"),
    ),
    NumberedRule(
        "13",
        "After check 9, if a reader wants it: the [golden answer](#golden-answers). If it is wrong, no "
        "result may be used.",
        ("programs.canary.Canary.ask",),
        AnswerError,
    ),
)
"""The rules for what a load uses, in the order in which it comes to them; some only when it needs them."""

ATTACHED = (
    NumberedRule(
        "14",
        "What else `index.json` lists, its config and its layers are there, with digest and size; its "
        "subject too, with the right media type and size. A list of parts has `bomFormat` CycloneDX, a "
        "statement the `_type` of in-toto, a signature the `mediaType` of sigstore's bundles.",
        (
            "format.blob_hashing.check_blob",
            "format.audit.check_subject",
            "format.audit.check_content",
        ),
    ),
    NumberedRule(
        "15",
        "What `dev.prejit.attached` names is attached to the bundle, where the bundle's index is there.",
        ("format.audit.check_types",),
    ),
    NumberedRule(
        "16",
        "If the first key of `index.json` is `manifests`, prejit wrote it: it and `oci-layout` have the "
        "bytes of our writer: canonical JSON; the bundle, the targets in the order of its index, then all "
        "others, sorted by digest.",
        ("format.audit.check_root", f"{_CHECKS}.oci.check_layout_file"),
    ),
    NumberedRule(
        "17",
        "There are no other files, links or directories in the layout.",
        ("format.audit.check_names",),
    ),
)
"""The rules for what is no part of the bundle, in the order in which `prejit verify` comes to them."""

"""Every check of a bundle's files, numbered as in docs/bundle-format.md. No file access, no JAX.

A check takes bytes and raises RejectError, which names the file at fault, or returns what the bytes mean. It
trusts only what checks with a smaller number in the column "order" have verified:

    order  number    checks                                      function
    1      1         `oci-layout`                                oci.check_layout_file,
                                                                 check_layout_version
    2      2, 4      the bundle's index and its descriptors      oci.check_index, check_descriptor
    3      3         name and requirement of each target         oci.target_of
    4      5, 6, 4   digest and content of each manifest         oci.check_digest, check_manifest
    5      5, 7      digest and content of a target's config     program_table.check_config,
                                                                 check_kernels_layer and others
    6      8         digests of the layers of the target, each   format.blobs: `Blobs`
                     part before it is used
    7      9         the library of native kernels               layers.check_kernels
    8      10        weights                                     layers.check_weights,
                                                                 program_table.check_weight_sets
    9      7, 9      a program, when it is used: its arrays, its program_table.check_array, layers.unpack,
                     frame, the signature that XLA compiled      layers.check_signature
    verify 14, 15    what refers to the bundle, and what the    attached.check_subject,
                     build attached                              check_content, check_types
    verify 16, 17    `index.json` of ours, and all files that   attached.check_root, check_names
                     nothing leads to
    any    11        chat templates, when one is used            chat_layer.check_chat
    any    12        the generation config                       generation.options.check_generation

Only `prejit verify` does those in the order "verify". Begin with `oci`.
"""

"""What executables need of a CPU: read from their instructions, compared with what objdump shows."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prejit.compiler.compile.worker import disassembly
from prejit.compiler.compile.worker.disassembly import (
    EVERYWHERE,
    LLVM_NAMES,
    declared_features,
    narrowed,
    used_features,
)
from prejit.compiler.compile.worker.xla import compile_portable
from prejit.compiler.targets.build_host import cross_compiles, jaxlib_version
from prejit.compiler.targets.target_table import target
from prejit.runtime.errors import BuildError
from prejit.runtime.machine.fingerprint import CPU_FEATURES

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="reads x86-64 code")

COMPILE = """
import sys
from pathlib import Path
from prejit.compiler.targets.target_table import target
from prejit.compiler.compile.worker.xla import CompileFor, compile_portable
level = target(sys.argv[1])
machine = CompileFor(cpu=level.cpu, cpu_features=level.cpu_features)
compiled = compile_portable(Path(sys.argv[2]).read_bytes(), machine)
Path(sys.argv[3]).write_bytes(compiled.serialized)
"""
NEVER_COMPILED = set(
    # LLVM makes no use of these on its own account: of the kernel, of virtual machines, of transactions,
    # for an intrinsic that XLA never calls, or of processors that are not x86-64.
    """
    AESKLE AVX512ER AVX512PF AVX512_4FMAPS AVX512_4VNNIW CENTAUR_AIS CET_SS CL1INVMB CLDEMOTE
    CYRIX_D3NOW CYRIX_DDI CYRIX_DMI CYRIX_EMMI CYRIX_FPU CYRIX_SHR CYRIX_SMINT CYRIX_SMINT_0F7E
    CYRIX_SMM D3NOW D3NOWEXT ENQCMD FPU287XL_ONLY FPU387SL_ONLY FRED HLE HLE_OR_RTM HRESET IA64
    INTEL286_ONLY INTEL386_A0_ONLY INTEL386_ONLY INTEL486_A_ONLY INTEL8086_ONLY INVEPT INVLPGB INVVPID
    KL KNC LKGS LWP MCOMMIT MONITOR MONITORX MOV_TR MPX MSR MSRLIST OSS PADLOCK_ACE PADLOCK_GMI
    PADLOCK_PHE PADLOCK_PMM PADLOCK_RNG PADLOCK_UNDOC PCOMMIT PCONFIG PKU PREFETCHITI PREFETCHWT1
    PTWRITE RAO_INT RDPMC RDPRU RDTSCP RMPQUERY RTM SEP SEV_ES SEV_SNP SGX1 SHA512 SKINIT SKINIT_OR_SVM
    SM3 SM4 SMAP SMM SMX SVM SYSCALL TDX TSE TSXLDTRK UDBG UINTR UMOV VMX WBNOINVD WIDE_KL WRMSRNS
    """.split()  # noqa: SIM905 (a list of them has a line for each)
)
INSTRUCTIONS = [
    # By GNU as 2.40.
    ("0f58c1", "sse"),  # addps %xmm1,%xmm0
    ("660f58c1", "sse2"),  # addpd %xmm1,%xmm0
    ("f20f7cc1", "sse3"),  # haddps %xmm1,%xmm0
    ("660f3800c1", "ssse3"),  # pshufb %xmm1,%xmm0
    ("660f3a08c101", "sse4.1"),  # roundps $1,%xmm1,%xmm0
    ("660f3837c1", "sse4.2"),  # pcmpgtq %xmm1,%xmm0
    ("f20f38f1c1", "sse4.2"),  # crc32l %ecx,%eax
    ("f30fb8c1", "popcnt"),  # popcnt %ecx,%eax
    ("f30fbdc1", "lzcnt"),  # lzcnt %ecx,%eax
    ("c4e268f2c1", "bmi"),  # andn %ecx,%edx,%eax
    ("c4e271f7c2", "bmi2"),  # shlx %ecx,%edx,%eax
    ("0f38f008", "movbe"),  # movbe (%rax),%ecx
    ("0f45c1", "cmov"),  # cmovne %ecx,%eax
    ("0fc708", "cx8"),  # cmpxchg8b (%rax)
    ("f0480fc708", "cx16"),  # lock cmpxchg16b (%rax)
    ("9e", "sahf"),  # sahf
    ("660f38f6c1", "adx"),  # adcx %ecx,%eax
    ("660f38dcc1", "aes"),  # aesenc %xmm1,%xmm0
    ("0f38cbca", "sha"),  # sha256rnds2 %xmm0,%xmm2,%xmm1
    ("660f3a44c100", "pclmul"),  # pclmulqdq $0,%xmm1,%xmm0
    ("660f38cfc1", "gfni"),  # gf2p8mulb %xmm1,%xmm0
    ("c4e27dcfd1", "avx gfni"),  # vgf2p8mulb %ymm1,%ymm0,%ymm2
    ("c4e27ddcd1", "vaes"),  # vaesenc %ymm1,%ymm0,%ymm2
    ("c5fc58d1", "avx"),  # vaddps %ymm1,%ymm0,%ymm2
    ("c5fdfed1", "avx2"),  # vpaddd %ymm1,%ymm0,%ymm2
    ("c4e27db8d1", "fma"),  # vfmadd231ps %ymm1,%ymm0,%ymm2
    ("c4e27d13c1", "f16c"),  # vcvtph2ps %xmm1,%ymm0
    ("c4e27d50d1", "avxvnni"),  # {vex} vpdpbusd %ymm1,%ymm0,%ymm2
    ("62f17c4858d1", "avx512f"),  # vaddps %zmm1,%zmm0,%zmm2
    ("62f17c2958d1", "avx512f avx512vl"),  # vaddps %ymm1,%ymm0,%ymm2{%k1}
    ("62a17500efd0", "avx512f avx512vl"),  # vpxord %xmm16,%xmm17,%xmm18
    ("62f17d48fcd1", "avx512bw"),  # vpaddb %zmm1,%zmm0,%zmm2
    ("62f2fd4840d1", "avx512dq"),  # vpmullq %zmm1,%zmm0,%zmm2
    ("62f27d4844c1", "avx512cd"),  # vplzcntd %zmm1,%zmm0
    ("62f27d4850d1", "avx512vnni"),  # vpdpbusd %zmm1,%zmm0,%zmm2
    ("62f27e4852d1", "avx512bf16 avx512f"),  # vdpbf16ps %zmm1,%zmm0,%zmm2
    ("62f57c4858d1", "avx512fp16"),  # vaddph %zmm1,%zmm0,%zmm2
    ("62f27d4855c1", "avx512vpopcntdq"),  # vpopcntd %zmm1,%zmm0
    ("c4e2725cd0", "amx-bf16"),  # tdpbf16ps %tmm1,%tmm0,%tmm2
    ("c4e271e002", "cmpccxadd"),  # cmpoxadd %ecx,%eax,(%rdx)
    ("0f01d0", "xsave"),  # xgetbv
    ("0fc7f0", "rdrnd"),  # rdrand %eax
    ("0f0d08", "prfchw"),  # prefetchw (%rax)
    ("0fae00", "fxsr"),  # fxsave (%rax)
    ("0ffec1", "mmx"),  # paddd %mm1,%mm0
    ("d8c1", ""),  # fadd %st(1),%st
    ("f30f1efa", ""),  # endbr64
    ("660f1f840000000000", ""),  # nopw 0(%rax,%rax,1)
]
RET = bytes.fromhex("c3")  # of 64 bits: "64bit"
TZCNT = bytes.fromhex("f30fbcc1")  # or `rep bsf`
AVX512 = bytes.fromhex("62f17c4858d1")
EXECUTABLE, DATA = 6, 3  # SHF_ALLOC | SHF_EXECINSTR, SHF_ALLOC | SHF_WRITE


def elf(sections: Iterable[tuple[int, bytes]], machine: int = 62) -> bytes:
    """An ELF object of (flags, content) sections: elf(5). 62 is EM_X86_64."""
    sections = [(0, b""), *sections]
    contents = b"".join(content for _, content in sections)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 1, machine, 1, 0, 0, 64 + len(contents), 0, 64, 0, 0, 64, len(sections), 0
    )
    table, at = b"", 64
    for flags, content in sections:
        table += struct.pack("<IIQQQQIIQQ", 0, 1, flags, 0, at, len(content), 0, 0, 1, 0)
        at += len(content)
    return header + contents + table


def field(number: int, content: bytes) -> bytes:
    size = len(content)
    digits = [size >> shift & 127 for shift in range(0, max(size.bit_length(), 1), 7)]
    return bytes([number << 3 | 2, *(digit | 128 for digit in digits[:-1]), digits[-1]]) + content


def executable(
    *objects: bytes, declared: str = "+64bit,+sse2", symbols: Iterable[str] = (), extra: bytes = b""
) -> bytes:
    """A serialized executable as XLA:CPU makes them, of these objects."""
    result = b"".join(field(7, field(2, symbol.encode())) for symbol in symbols)
    result += b"".join(field(8, field(1, contents)) for contents in objects)
    result += field(9, field(1, b"x86_64-unknown-linux-gnu") + field(3, declared.encode())) + extra
    return b"\x02\x08\x03" + field(1, result) + field(2, b"")


def code(*sections: bytes) -> bytes:
    return elf((EXECUTABLE, section) for section in sections)


@pytest.fixture(scope="module")
def portable() -> bytes:
    """Not with float16: jaxlib 0.10 to 0.12 cannot link it for a CPU without f16c."""
    import jax
    import jax.numpy as jnp
    from jax import export, lax

    def many(x: jax.Array, k: jax.Array, h: jax.Array, q: jax.Array) -> tuple[jax.Array, ...]:
        def trailing_zeros(i: jax.Array, total: jax.Array) -> jax.Array:
            total += lax.population_count((k[i % 32, 0] & -k[i % 32, 0]) - 1)
            return total

        whole = q.astype(jnp.int32)
        return (
            *(jnp.tanh(x @ x), jnp.sort(x, axis=0), jnp.cumsum(x), jnp.exp(x).sum(), jnp.round(x)),
            *(jnp.argmax(x), lax.top_k(x, 4)[0], jax.nn.softmax(x), x.at[k[:4, 0] % 32].add(1.0)),
            *(lax.clz(k) + lax.population_count(k), (k << k) * k // 7, k.astype(jnp.float32)),
            lax.fori_loop(0, k[0, 0], trailing_zeros, jnp.int32(0)),
            lax.conv_general_dilated(x[None, None], x[None, None, :3, :3], (1, 1), "SAME"),
            jax.random.normal(jax.random.key(k[0, 0]), (64,)),
            *(jnp.fft.fft(x), (h.astype(jnp.float32) * 2).astype(jnp.bfloat16) @ h, whole @ whole),
        )

    arguments = [
        jax.ShapeDtypeStruct((32, 32), dtype)
        for dtype in (jnp.float32, jnp.int32, jnp.bfloat16, jnp.int8)
    ]
    return bytes(
        export.export(jax.jit(many), platforms=("cpu",))(*arguments).mlir_module_serialized
    )


@pytest.fixture(scope="module", params=["cpu-x86-64-v2", "cpu-x86-64-v3"])
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def compiled(level: str, portable: bytes, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """In a process of its own: jaxlib 0.10 takes the level from XLA_FLAGS, and that once."""
    at = tmp_path_factory.mktemp(level)
    (at / "portable").write_bytes(portable)
    flags = (
        "" if cross_compiles(jaxlib_version()) else f"--xla_cpu_max_isa={target(level).xla_max_isa}"
    )
    subprocess.run(
        [sys.executable, "-c", COMPILE, level, at / "portable", at / "serialized"],
        env={**os.environ, "XLA_FLAGS": flags},
        check=True,
    )
    return (at / "serialized").read_bytes()


def object_files(serialized: bytes) -> tuple[bytes, ...]:
    return disassembly._objects(disassembly._compilation_result(serialized))


# Real executables


def test_every_object_is_read_and_none_exceeds_its_level(level: str, compiled: bytes) -> None:
    objects = object_files(compiled)
    assert len(objects) == compiled.count(b"\x7fELF") > 10
    for contents in objects:  # each is whole: LLVM writes the table of sections last
        (table,) = struct.unpack_from("<Q", contents, 40)
        size, count = struct.unpack_from("<HH", contents, 58)
        assert len(contents) == table + size * count
    used, declared = set(used_features(compiled)), set(declared_features(compiled))
    assert {"64bit", "cmov"} < used < declared
    allowed = target(level).cpu_features
    if cross_compiles(jaxlib_version()):
        assert used <= set(allowed)


@pytest.mark.parametrize("level", ["cpu-x86-64-v3"], indirect=True, scope="module")
def test_a_truncated_or_damaged_executable_is_refused_or_needs_no_less(compiled: bytes) -> None:
    used = set(used_features(compiled))
    size = len(compiled)
    refused = 0
    for end in (*range(0, 4000, 97), *range(4000, size, size // 30)):
        try:
            assert used <= set(used_features(compiled[:end]))
        except BuildError:
            refused += 1
    assert refused > 60
    for at in range(0, size, size // 30):
        damaged = bytearray(compiled)
        damaged[at] ^= 0xFF
        with suppress(BuildError):
            assert set(used_features(bytes(damaged))) <= CPU_FEATURES.keys()


# Instructions


def test_an_instruction_needs_its_extensions_and_no_more() -> None:
    for instruction, extensions in INSTRUCTIONS:
        used = used_features(executable(code(bytes.fromhex(instruction) + RET)))
        assert set(used) == {"64bit", *extensions.split()}, instruction


def test_instructions_of_all_objects_count_as_llvm_may_use_them_and_data_does_not() -> None:
    by_name = {names: bytes.fromhex(digits) for digits, names in INSTRUCTIONS}
    serialized = executable(code(RET, by_name["avx"]), code(by_name["fma"]), code(RET))
    assert used_features(serialized) == ("64bit", "avx", "fma")
    assert used_features(executable(elf([(DATA, AVX512), (EXECUTABLE, RET)]))) == ("64bit",)
    assert used_features(executable()) == ()
    # An extension that LLVM was not allowed counts all the same.
    assert used_features(executable(code(AVX512), declared="+sse2")) == ("avx512f",)
    contents = code(TZCNT + RET)
    assert used_features(executable(contents, declared="+64bit,+sse2")) == ("64bit",)
    assert used_features(executable(contents, declared="+64bit,-bmi,+sse2")) == ("64bit",)
    assert used_features(executable(contents, declared="+64bit,+bmi")) == ("64bit", "bmi")
    contents = elf([(EXECUTABLE, RET), (0, b"\0prefix_kernel\0")])
    assert used_features(executable(contents, symbols=["prefix_kernel", "kernel"])) == ("64bit",)


DECLARED = "+64bit,+avx,-avx2,+prefer-no-gather,+sse2,+warp"
DECLARED_FEATURES = ("64bit", "avx", "sse2")


HEADER = struct.pack("<QQ", 64, 1)  # of a section: where it starts, its size
UNREADABLE = {
    "no instruction": executable(code(b"\x06"), declared=DECLARED),
    "APX": executable(code(bytes.fromhex("d5194889c8c3")), declared=DECLARED),  # mov %r17,%r16
    "half an instruction": executable(code(RET + b"\x62\xf1"), declared=DECLARED),
    "of a hypervisor": executable(code(bytes.fromhex("0f01c1")), declared=DECLARED),  # vmcall
    "aarch64": executable(elf([(EXECUTABLE, RET)], machine=183), declared=DECLARED),
    "half a table": executable(code(RET)[:-1], declared=DECLARED),
    "long section": executable(
        code(RET).replace(HEADER, struct.pack("<QQ", 64, 999)), declared=DECLARED
    ),
    "half a header": executable(code(RET)[:60], declared=DECLARED),
    "empty object": executable(b"", declared=DECLARED),
    "function missing": executable(code(RET), declared=DECLARED, symbols=["not_there"]),
    "all objects missing": executable(declared=DECLARED, symbols=["not_there"]),
    "object elsewhere": executable(code(RET), declared=DECLARED, extra=field(4, code(AVX512))),
    "all objects elsewhere": executable(declared=DECLARED, extra=field(4, code(AVX512))),
    "object without contents": executable(code(RET), declared=DECLARED, extra=field(8, b"")),
}


@pytest.mark.parametrize("unreadable", UNREADABLE.values(), ids=UNREADABLE)
def test_code_that_cannot_be_read_needs_all_that_llvm_was_allowed(unreadable: bytes) -> None:
    assert used_features(unreadable) == declared_features(unreadable) == DECLARED_FEATURES


def test_what_llvm_never_chooses_is_not_needed_by_code_that_cannot_be_read() -> None:
    """Linux hides it on some CPUs where LLVM finds it: the machine that built this would not match."""
    unreadable = executable(b"", declared="+avx,+rdrnd,+rdseed,+sse2")
    assert declared_features(unreadable) == ("avx", "rdrnd", "rdseed", "sse2")
    assert used_features(unreadable) == ("avx", "sse2")


def test_what_is_no_executable_is_an_error() -> None:
    without_list = b"\x02\x08\x03" + field(1, b"") + field(2, b"")  # of what LLVM may use
    whole, endless = executable(code(RET)), b"\xff" * 100_000
    for other in (b"", b"\0", endless, b"\x7fELF", code(RET), whole[:-4], whole[3:], without_list):
        for function in (used_features, declared_features):
            with pytest.raises(BuildError, match="expected an executable of XLA:CPU") as raised:
                function(other)
            assert raised.value.hint


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused_and_random_code_needs_something_known(content: bytes) -> None:
    with pytest.raises(BuildError):
        used_features(content)
    assert set(used_features(executable(code(content)))) <= CPU_FEATURES.keys()
    for contents in (content, code(RET)[:64] + content):
        assert used_features(executable(contents)) in {("64bit", "sse2"), ()}


# Names


def test_every_extension_of_iced_is_decided_by_a_name_of_machines() -> None:
    """A new iced that knows of new ones ends here, and not in a bundle."""
    import iced_x86

    known = {name for name in vars(iced_x86.CpuidFeature) if name.isupper()}
    decided = [LLVM_NAMES.keys(), EVERYWHERE, NEVER_COMPILED]
    assert known == set().union(*decided)
    assert len(known) == sum(map(len, decided))
    # `crc32` is sse4.2 in a fingerprint; `sahf` is recognized by its instructions.
    assert {*LLVM_NAMES.values(), "crc32", "sahf"} == set(CPU_FEATURES)
    assert len(set(LLVM_NAMES.values())) == len(LLVM_NAMES)


def test_iced_is_imported_when_it_is_needed() -> None:
    """A worker's environment does not have it."""
    check = "import sys, prejit.compiler.compile.worker.disassembly; sys.exit('iced_x86' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_what_is_narrowed_tells_of_what_it_uses_and_runs_the_same() -> None:
    """Or XLA logs errors about extensions that no instruction is of, wherever the bundle loads."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import export

    from prejit.runtime.device.device import Device
    from prejit.runtime.device.transfer import to_numpy

    x = np.linspace(-1, 1, 96, dtype=np.float32).reshape(8, 12)
    exported = export.export(jax.jit(lambda x: jnp.tanh(x @ x.T).sum(0)), platforms=["cpu"])(x)
    serialized = compile_portable(exported.mlir_module_serialized).serialized
    used = used_features(serialized)
    narrow = narrowed(serialized, used)
    assert declared_features(narrow) == used
    assert used != declared_features(serialized)
    assert object_files(narrow) == object_files(serialized)
    device = Device()
    [a], [b] = (device.load(one, "f").run([device.put(x)]) for one in (serialized, narrow))
    np.testing.assert_array_equal(to_numpy(a), to_numpy(b))
    with pytest.raises(BuildError):
        narrowed(b"\x01", used)

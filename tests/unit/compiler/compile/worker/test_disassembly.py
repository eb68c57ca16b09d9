"""What executables need of a CPU: read from their instructions, compared with what objdump shows."""

import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.recipes import export

from prejit.compiler.compile.worker import disassembly
from prejit.compiler.compile.worker.disassembly import declared_features, narrowed, used_features
from prejit.compiler.compile.worker.xla import CompileFor, compile_portable
from prejit.compiler.compile.worker.xla_messages import read_executable
from prejit.compiler.targets.build_host import cross_compiles, jaxlib_version
from prejit.compiler.targets.target_table import target
from prejit.runtime.errors import BuildError
from prejit.runtime.machine.fingerprint import CPU_FEATURES

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="reads x86-64 code")
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
ASSEMBLED = """
addps 0f58c1 sse, addpd 660f58c1 sse2, haddps f20f7cc1 sse3, pshufb 660f3800c1 ssse3
roundps 660f3a08c101 sse4.1, pcmpgtq 660f3837c1 sse4.2, crc32l f20f38f1c1 sse4.2
popcnt f30fb8c1 popcnt, lzcnt f30fbdc1 lzcnt, andn c4e268f2c1 bmi, shlx c4e271f7c2 bmi2
movbe 0f38f008 movbe, cmovne 0f45c1 cmov, cmpxchg8b 0fc708 cx8, cmpxchg16b f0480fc708 cx16
sahf 9e sahf, adcx 660f38f6c1 adx, aesenc 660f38dcc1 aes, sha256rnds2 0f38cbca sha
pclmulqdq 660f3a44c100 pclmul, gf2p8mulb 660f38cfc1 gfni, vgf2p8mulb c4e27dcfd1 avx gfni
vaesenc c4e27ddcd1 vaes, vaddps c5fc58d1 avx, vpaddd c5fdfed1 avx2, vfmadd231ps c4e27db8d1 fma
vcvtph2ps c4e27d13c1 f16c, vpdpbusd c4e27d50d1 avxvnni, vaddps-zmm 62f17c4858d1 avx512f
vaddps-ymm-k1 62f17c2958d1 avx512f avx512vl, vpxord-xmm18 62a17500efd0 avx512f avx512vl
vpaddb 62f17d48fcd1 avx512bw, vpmullq 62f2fd4840d1 avx512dq, vplzcntd 62f27d4844c1 avx512cd
vpdpbusd-zmm 62f27d4850d1 avx512vnni, vdpbf16ps 62f27e4852d1 avx512bf16 avx512f
vaddph 62f57c4858d1 avx512fp16, vpopcntd 62f27d4855c1 avx512vpopcntdq, tdpbf16ps c4e2725cd0 amx-bf16
tdpbssd c4e2535ec4 amx-int8, cmpoxadd c4e271e002 cmpccxadd, xgetbv 0f01d0 xsave, rdrand 0fc7f0 rdrnd
prefetchw 0f0d08 prfchw, fxsave 0fae00 fxsr, paddd 0ffec1 mmx, fadd d8c1, endbr64 f30f1efa
nopw 660f1f840000000000
"""
"""Instructions by GNU as 2.40: each with its bytes and the features that it needs."""
INSTRUCTIONS = [
    (bytes.fromhex(digits), features)
    for _, digits, *features in map(str.split, ASSEMBLED.strip().replace("\n", ", ").split(", "))
]
RET = bytes.fromhex("c3")  # of 64 bits: "64bit"
TZCNT = bytes.fromhex("f30fbcc1")  # or `rep bsf`
AVX512 = bytes.fromhex("62f17c4858d1")
EXECUTABLE, DATA = 6, 3  # SHF_ALLOC | SHF_EXECINSTR, SHF_ALLOC | SHF_WRITE


def elf(sections, machine=62):
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


def field(number, content):
    size = len(content)
    digits = [size >> shift & 127 for shift in range(0, max(size.bit_length(), 1), 7)]
    return bytes([number << 3 | 2, *(digit | 128 for digit in digits[:-1]), digits[-1]]) + content


def executable(*objects, declared="+64bit,+sse2", symbols=(), extra=b""):
    """A serialized executable as XLA:CPU makes them, of these objects."""
    result = b"".join(field(7, field(2, symbol.encode())) for symbol in symbols)
    result += b"".join(field(8, field(1, contents)) for contents in objects)
    result += field(9, field(1, b"x86_64-unknown-linux-gnu") + field(3, declared.encode())) + extra
    return b"\x02\x08\x03" + field(1, result) + field(2, b"")


def code(*sections):
    return elf((EXECUTABLE, section) for section in sections)


def portable():
    """Not with float16: jaxlib 0.10 to 0.12 cannot link it for a CPU without f16c."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def many(x, k, h, q):
        whole = q.astype(jnp.int32)
        return (
            *(jnp.tanh(x @ x), jnp.sort(x, axis=0), jnp.cumsum(x), jnp.exp(x).sum(), jnp.round(x)),
            *(jnp.argmax(x), lax.top_k(x, 4)[0], jax.nn.softmax(x), x.at[k[:4, 0] % 32].add(1.0)),
            *(lax.clz(k) + lax.population_count(k), (k << k) * k // 7, k.astype(jnp.float32)),
            lax.conv_general_dilated(x[None, None], x[None, None, :3, :3], (1, 1), "SAME"),
            jax.random.normal(jax.random.key(k[0, 0]), (64,)),
            *(jnp.fft.fft(x), (h.astype(jnp.float32) * 2).astype(jnp.bfloat16) @ h, whole @ whole),
        )

    dtypes = ("float32", "int32", "bfloat16", "int8")
    return export(many, *(jax.ShapeDtypeStruct((32, 32), dtype) for dtype in dtypes))


def object_files(serialized):
    return [each.content for each in read_executable(serialized)[1].result.objects]


@pytest.mark.parametrize("name", ["cpu-x86-64-v2", "cpu-x86-64-v3"])
def test_every_object_is_read_and_none_exceeds_its_level(name):
    if not cross_compiles(jaxlib_version()):
        pytest.skip("jaxlib 0.10 takes the level from XLA_FLAGS alone")
    level = target(name)
    machine = CompileFor(cpu=level.cpu, cpu_features=level.cpu_features)
    serialized = compile_portable(portable(), machine).serialized
    objects = object_files(serialized)
    assert len(objects) == serialized.count(b"\x7fELF") > 10
    for contents in objects:  # each is whole: LLVM writes the table of sections last
        (table,) = struct.unpack_from("<Q", contents, 40)
        size, count = struct.unpack_from("<HH", contents, 58)
        assert len(contents) == table + size * count
    used, declared = set(used_features(serialized)), set(declared_features(serialized))
    assert {"64bit", "cmov"} < used < declared
    assert used <= set(level.cpu_features or ())


def test_an_instruction_needs_its_extensions_and_no_more_and_data_none():
    assert len(INSTRUCTIONS) == 49
    for instruction, extensions in INSTRUCTIONS:
        used = used_features(executable(code(instruction + RET)))
        assert set(used) == {"64bit", *extensions}, instruction
    vaddps, vfmadd = bytes.fromhex("c5fc58d1"), bytes.fromhex("c4e27db8d1")
    several = [code(RET, vaddps), code(vfmadd), code(RET)]
    data = elf([(DATA, AVX512), (EXECUTABLE, RET)])
    named = elf([(EXECUTABLE, RET), (0, b"\0prefix_kernel\0")])
    for objects, options, used in (
        (several, {}, ("64bit", "avx", "fma")),
        ([data], {}, ("64bit",)),
        ([], {}, ()),
        ([code(AVX512)], {"declared": "+sse2"}, ("avx512f",)),  # though LLVM was not allowed it
        ([code(TZCNT + RET)], {"declared": "+64bit,+sse2"}, ("64bit",)),
        ([code(TZCNT + RET)], {"declared": "+64bit,-bmi,+sse2"}, ("64bit",)),
        ([code(TZCNT + RET)], {"declared": "+64bit,+bmi"}, ("64bit", "bmi")),
        ([named], {"symbols": ["prefix_kernel", "kernel"]}, ("64bit",)),
    ):
        assert used_features(executable(*objects, **options)) == used, (objects, options)


DECLARED = "+64bit,+avx,-avx2,+prefer-no-gather,+sse2,+warp"
HEADER = struct.pack("<QQ", 64, 1)  # of a section: where it starts, its size


def test_code_that_cannot_be_read_needs_all_that_llvm_was_allowed():
    for name, objects, more in (
        ("no instruction", [code(b"\x06")], {}),
        ("APX", [code(bytes.fromhex("d5194889c8c3"))], {}),  # mov %r17,%r16
        ("half an instruction", [code(RET + b"\x62\xf1")], {}),
        ("of a hypervisor", [code(bytes.fromhex("0f01c1"))], {}),  # vmcall
        ("aarch64", [elf([(EXECUTABLE, RET)], machine=183)], {}),
        ("half a table", [code(RET)[:-1]], {}),
        ("long section", [code(RET).replace(HEADER, struct.pack("<QQ", 64, 999))], {}),
        ("half a header", [code(RET)[:60]], {}),
        ("empty object", [b""], {}),
        ("function missing", [code(RET)], {"symbols": ["not_there"]}),
        ("all objects missing", [], {"symbols": ["not_there"]}),
        ("object elsewhere", [code(RET)], {"extra": field(4, code(AVX512))}),
        ("all objects elsewhere", [], {"extra": field(4, code(AVX512))}),
        ("object without contents", [code(RET)], {"extra": field(8, b"")}),
    ):
        unreadable = executable(*objects, declared=DECLARED, **more)
        found = used_features(unreadable)
        assert found == declared_features(unreadable) == ("64bit", "avx", "sse2"), name
    # But not what Linux hides on some CPUs where LLVM finds it: the build host would not match.
    unreadable = executable(b"", declared="+avx,+rdrnd,+rdseed,+sse2")
    assert declared_features(unreadable) == ("avx", "rdrnd", "rdseed", "sse2")
    assert used_features(unreadable) == ("avx", "sse2")
    without_list = b"\x02\x08\x03" + field(1, b"") + field(2, b"")  # of what LLVM may use
    whole, endless = executable(code(RET)), b"\xff" * 100_000
    for other in (b"", b"\0", endless, b"\x7fELF", code(RET), whole[:-4], whole[3:], without_list):
        for function in (used_features, declared_features):
            with pytest.raises(BuildError, match="expected an executable of XLA:CPU") as raised:
                function(other)
            assert raised.value.hint


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused_and_random_code_needs_something_known(content):
    with pytest.raises(BuildError):
        used_features(content)
    assert set(used_features(executable(code(content)))) <= CPU_FEATURES.keys()
    for contents in (content, code(RET)[:64] + content):
        assert used_features(executable(contents)) in {("64bit", "sse2"), ()}


def test_every_extension_of_iced_is_decided_by_a_name_of_machines():
    """A new iced that knows of new ones ends here, and not in a bundle."""
    import iced_x86

    names = disassembly.LLVM_NAMES
    known = {name for name in vars(iced_x86.CpuidFeature) if name.isupper()}
    decided = [names.keys(), disassembly.EVERYWHERE, NEVER_COMPILED]
    assert known == set().union(*decided)
    assert len(known) == sum(map(len, decided))
    # `crc32` is sse4.2 in a fingerprint; `sahf` is recognized by its instructions.
    assert {*names.values(), "crc32", "sahf"} == set(CPU_FEATURES)
    assert len(set(names.values())) == len(names)


def test_what_is_narrowed_tells_of_what_it_uses_and_runs_the_same():
    """Or XLA logs errors about extensions that no instruction is of, wherever the bundle loads."""
    import jax.numpy as jnp
    import numpy as np

    from prejit.runtime.device.device import Device
    from prejit.runtime.device.transfer import to_numpy

    x = np.linspace(-1, 1, 96, dtype=np.float32).reshape(8, 12)
    serialized = compile_portable(export(lambda x: jnp.tanh(x @ x.T).sum(0), x)).serialized
    used = used_features(serialized)
    narrow = narrowed(serialized, used)
    assert declared_features(narrow) == used
    assert used != declared_features(serialized)
    assert sorted(object_files(narrow)) == sorted(object_files(serialized))
    device = Device()
    [a], [b] = (device.load(one, "f").run([device.put(x)]) for one in (serialized, narrow))
    np.testing.assert_array_equal(to_numpy(a), to_numpy(b))
    with pytest.raises(BuildError):
        narrowed(b"\x01", used)

"""What the study of a cluster counts: a compile that is made again, and whose fault it was."""

from benchmarks.studies.many_machines import Attempts, count


def line(program, target="cpu-x86-64-v3"):
    return f"compiled sha256:{program * 64} for {target} (jaxlib 0.12.0, 1 CPUs that XLA sees)\n"


def test_only_what_a_killed_node_had_compiled_may_be_compiled_again(tmp_path):
    logs = {
        "old/worker-aa-01000000-11.err": line("a") + "a warning\n" + line("b"),
        "worker-bb-01000000-12.err": line("b") + line("c") + line("d"),
        "worker-cc-01000000-13.err": line("d") + line("a", "cpu-x86-64-v2"),
        "worker-dd-01000000-14.out": line("a"),
        "raylet.err": line("a"),
    }
    (tmp_path / "old").mkdir()
    for name, text in logs.items():
        (tmp_path / name).write_text(text)
    lines = [
        "matrix/f for cpu-x86-64-v3: the node died",
        "matrix/g for cpu-x86-64-v3: the worker died",
        "matrix/h for cpu-x86-64-v3: the node died",
        "d takes long: a second attempt runs on vm",
        "compiled matrix/f for cpu-x86-64-v3 on vm in 0.1 s (1/5)",
    ]
    assert count(tmp_path, {11, 99}, lines) == Attempts(
        compiled=7,
        programs=5,
        on_killed=1,  # b: once on the node that was killed
        elsewhere=1,  # d
        second=1,
        lost=(("the node died", 2), ("the worker died", 1)),
    )

"""What XLA's compiler is told of machines that are not here."""

from prejit.compiler.compile.worker.xla import _one_host


def test_a_slice_is_of_one_host_up_to_eight_chips_in_two_dimensions_and_four_in_three():
    for slice_, bounds in (("v5e:1x1", (1, 1, 1)), ("v5e:2x4", (2, 4, 1)), ("v4:2x2x1", (2, 2, 1))):
        assert _one_host(slice_) == {"chips_per_host_bounds": bounds}
    assert _one_host("v5e:4x4") == _one_host("v4:2x2x2") == {}

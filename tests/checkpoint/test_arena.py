"""Memory for checkpoints: what counts as complete, where the memory goes, and how much of it there is."""

import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from keeping import memory_of_checkpoints

from headway.checkpoint.arena import PAGE, Arena, Shape, aligned, slots_that_fit
from headway.checkpoint.layout import new_tag
from headway.errors import PlatformError

PLACEHOLDER = "c0ffee00c0de"


def a_shape(image_bytes: int = 10_000, slots: int = 2, metadata_bytes: int = 100) -> Shape:
    return Shape(
        plan="plan", rank=3, world_size=4, image_bytes=image_bytes, metadata_bytes=metadata_bytes, slots=slots,
        placeholder=PLACEHOLDER,
    )  # fmt: skip


@pytest.fixture
def arena():  # type: ignore[no-untyped-def]
    made = Arena.create(a_shape(), b"m" * 100)
    yield made
    made.close()


# --- records ---------------------------------------------------------------------------------------------------------


def test_an_empty_arena_holds_nothing(arena: Arena) -> None:
    assert arena.held() == []


def test_a_slot_counts_when_it_is_sealed_and_not_before(arena: Arena) -> None:
    arena.open(0)
    arena.image(0)[:] = b"x" * 10_000
    assert arena.held() == []
    sealed = arena.seal(0, new_tag(1), step=7, saved_ns=8)
    assert arena.held() == [sealed]
    assert (sealed.step, sealed.saved_ns, sealed.slot) == (7, 8, 0)


def test_a_slot_that_is_opened_again_holds_nothing_and_the_other_one_still_does(arena: Arena) -> None:
    first, second = arena.seal(0, new_tag(1), 1, 0), arena.seal(1, new_tag(2), 2, 0)
    assert arena.held() == [first, second]
    arena.open(0)
    assert arena.held() == [second]
    third = arena.seal(0, new_tag(3), 3, 0)
    assert arena.held() == [second, third], "the oldest comes first, whatever its slot"


@given(at=st.integers(0, 39), bit=st.integers(0, 7))
def test_a_record_with_one_wrong_bit_does_not_count(at: int, bit: int) -> None:
    arena = Arena.create(a_shape(slots=1), b"")
    try:
        arena.seal(0, new_tag(5), step=77, saved_ns=10**18)
        arena.map[at : at + 1] = bytes([arena.map[at] ^ 1 << bit])
        assert arena.held() == []
    finally:
        arena.close()


@given(st.integers(0, 39))
def test_a_record_that_was_only_partly_written_does_not_count(written: int) -> None:
    arena = Arena.create(a_shape(slots=1), b"")
    try:
        arena.seal(0, new_tag(5), step=77, saved_ns=10**18)
        whole = arena.map[:40]
        arena.open(0)
        arena.map[:written] = whole[:written]
        assert arena.held() == [] or arena.map[:40] == whole  # the rest may happen to be zeros
    finally:
        arena.close()


def test_how_far_training_has_come_is_kept_and_unknown_at_first(arena: Arena) -> None:
    assert arena.reached == -1
    for step in (0, 12, 2**40):
        arena.reached = step
        assert arena.reached == step
    assert arena.held() == [], "it is not taken for a record"


# --- contents --------------------------------------------------------------------------------------------------------


@given(image=st.integers(1, 3 * PAGE), metadata=st.integers(0, 2 * PAGE), slots=st.integers(1, 4))
def test_slots_begin_on_pages_and_overlap_neither_each_other_nor_what_is_before_them(
    image: int, metadata: int, slots: int
) -> None:
    shape = a_shape(image, slots, metadata)
    starts = [shape.slot_offset(slot) for slot in range(slots)]
    assert all(start % PAGE == 0 for start in starts)
    assert starts[0] >= PAGE + metadata
    assert all(after - before >= image for before, after in zip(starts, [*starts[1:], shape.total], strict=True))
    assert shape.total < PAGE + metadata + slots * image + (slots + 1) * PAGE, "no more than the alignment is lost"


def test_what_is_written_to_one_slot_is_in_no_other(arena: Arena) -> None:
    arena.image(0)[:] = b"a" * 10_000
    arena.image(1)[:] = b"b" * 10_000
    assert bytes(arena.image(0)) == b"a" * 10_000
    assert bytes(arena.image(1)) == b"b" * 10_000
    assert arena.metadata(new_tag(1)) == b"m" * 100


def test_the_metadata_names_the_save_it_is_asked_for() -> None:
    template = b"before " + PLACEHOLDER.encode() + b" between " + PLACEHOLDER.encode()
    arena = Arena.create(a_shape(metadata_bytes=len(template)), template)
    try:
        tag = new_tag(9)
        assert arena.metadata(tag) == b"before " + tag.encode() + b" between " + tag.encode()
    finally:
        arena.close()


def test_pages_that_are_laid_in_beforehand_still_hold_what_was_written(arena: Arena) -> None:
    arena.image(1)[:] = b"b" * 10_000
    arena.prefault()
    arena.wait_for_pages()
    assert bytes(arena.image(1)) == b"b" * 10_000
    assert bytes(arena.image(0)) == bytes(10_000)


def test_memory_that_is_written_to_while_it_is_laid_in_loses_nothing() -> None:
    """Large enough for the kernel to make huge pages of it, here and there under the writer's hands."""
    arena = Arena.create(a_shape(24 << 20), b"")
    wanted = bytes(range(256)) * (96 << 10)
    try:
        arena.prefault()
        for _ in range(5):
            arena.image(0)[:] = wanted
        arena.wait_for_pages()
        assert bytes(arena.image(0)) == wanted
        assert bytes(arena.image(1)) == bytes(24 << 20)
    finally:
        arena.close()


def test_a_kernel_that_knows_neither_kind_of_advice_lays_pages_in_as_they_are_touched(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    for advice in ("_MADV_POPULATE_WRITE", "_MADV_COLLAPSE"):
        monkeypatch.setattr(f"headway.checkpoint.arena.{advice}", 250)
    told: list[int] = []
    arena.prefault(lambda address, size: told.append(size))
    arena.wait_for_pages()
    arena.image(0)[:] = b"a" * 10_000
    assert bytes(arena.image(0)) == b"a" * 10_000
    assert told == [arena.shape.total]


def test_tensors_that_look_at_it_still_can_when_it_is_closed() -> None:
    arena = Arena.create(a_shape(), b"")
    image = arena.image(0)
    image[:5] = b"hello"
    arena.close()
    assert bytes(image[:5]) == b"hello"


# --- whose memory it is ----------------------------------------------------------------------------------------------


def test_another_process_sees_the_same_memory(arena: Arena) -> None:
    os.set_inheritable(arena.fd, True)
    code = (
        "import sys; from headway.checkpoint.arena import Arena, Shape\n"
        "shape = Shape(plan='plan', rank=3, world_size=4, image_bytes=10_000, metadata_bytes=100, slots=2, "
        f"placeholder='{PLACEHOLDER}')\n"
        "arena = Arena(shape, int(sys.argv[1])); arena.image(1)[:5] = b'hello'; arena.seal(1, '000000010000', 5, 6)"
    )
    subprocess.run([sys.executable, "-c", code, str(arena.fd)], check=True, pass_fds=[arena.fd])
    [held] = arena.held()
    assert (held.tag, held.step, held.slot) == ("000000010000", 5, 1)
    assert bytes(arena.image(1)[:5]) == b"hello"


def test_it_has_no_name_in_any_file_system_and_is_gone_when_it_is_closed() -> None:
    before = set(memory_of_checkpoints())
    arena = Arena.create(a_shape(1 << 20), b"")
    [inode] = set(memory_of_checkpoints()) - before
    assert os.readlink(f"/proc/self/fd/{arena.fd}").startswith("/memfd:")
    assert os.fstat(arena.fd).st_nlink == 0
    arena.close()
    assert inode not in memory_of_checkpoints()


def test_it_is_freed_when_the_last_process_that_holds_it_has_gone() -> None:
    """Seen by the machine's count of shared memory, which others may move now and then: most of nine tries count."""
    size = 64 << 20
    assert median(freed_with_its_last_holder(size) for _ in range(9)) > size // 2


def freed_with_its_last_holder(size: int) -> int:
    arena = Arena.create(a_shape(size, slots=1), b"")
    arena.prefault()
    arena.wait_for_pages()
    os.set_inheritable(arena.fd, True)
    with subprocess.Popen(["sleep", "1000"], pass_fds=[arena.fd]) as other:
        arena.close()
        held = shared_memory()
        other.kill()
        other.wait()
    return held - shared_memory()


def shared_memory() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["Shmem"].split()[0]) * 1024


def test_an_arena_that_is_closed_while_somebody_looks_at_it_stays_until_they_do_not() -> None:
    arena = Arena.create(a_shape(), b"")
    arena.image(0)[:3] = b"abc"
    looked_at = arena.image(0)
    arena.close()
    assert bytes(looked_at[:3]) == b"abc"
    arena.close()


def test_more_than_there_can_be_is_an_error_that_says_how_much_was_asked_for() -> None:
    with pytest.raises(PlatformError, match=r"bytes for checkpoints in memory cannot be had"):
        Arena.create(a_shape(1 << 60, slots=1), b"")


# --- how much there is -----------------------------------------------------------------------------------------------

GB = 1 << 30


@pytest.mark.parametrize(
    ("free", "slots"), [(8 * GB, 2), (4 * GB, 2), (4 * GB - 2, 1), (2 * GB, 1), (2 * GB - 2, 0), (0, 0)]
)
def test_two_images_are_held_in_half_of_what_is_free_or_one_or_none(free: int, slots: int) -> None:
    assert slots_that_fit(GB, free) == slots


@given(st.integers(1, 1 << 40), st.integers(0, 1 << 45))
def test_images_never_take_more_than_half_of_what_is_free(image: int, free: int) -> None:
    assert slots_that_fit(image, free) * image <= free / 2


@given(st.integers(0, 1 << 40))
def test_what_is_aligned_is_a_whole_number_of_pages_and_less_than_one_more(size: int) -> None:
    assert 0 <= aligned(size) - size < PAGE
    assert aligned(size) % PAGE == 0

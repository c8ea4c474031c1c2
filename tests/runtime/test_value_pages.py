"""Pages that values between stages wait on: who has them, when they are used again, and that they are hardly larger."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from roundpipe.core.errors import HostMemoryError
from roundpipe.runtime.device.host_memory import Pages
from roundpipe.runtime.device.value_pages import LARGEST_FACTOR, SIZES_PER_OCTAVE, ValuePages, rounded
from tests.runtime.pinning import PAGE, Driver

SIZE = 64 * PAGE


class Copies:
    """What lanes were given by some moment, done when a test says so."""

    def __init__(self) -> None:
        self.done = False

    def is_done(self) -> bool:
        return self.done


class Host:
    """Pages, what pins them, and the copies that were under way whenever a value went."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.sizes: list[int] = []
        self.copies: list[Copies] = []
        self.pages = ValuePages(self._new, self._ends)
        self._lock = threading.RLock()  # the driver is of one thread

    def _new(self, num_bytes: int) -> Pages:
        self.sizes.append(num_bytes)
        return Pages(num_bytes, self._pin, self._unpin)

    def _pin(self, address: int, num_bytes: int) -> str | None:
        with self._lock:
            return self.driver.pin(address, num_bytes)

    def _unpin(self, address: int) -> None:
        with self._lock:
            self.driver.unpin(address)

    def _ends(self) -> list[Copies]:
        self.copies.append(Copies())
        return [self.copies[-1]]


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.mark.parametrize("num_bytes", [1, 4095, 12345, 16 << 20, 300_000 * 8192, (1 << 31) + 1, 3 << 30])
def test_sizes_are_little_larger_than_values(num_bytes: int) -> None:
    size = rounded(num_bytes)
    assert num_bytes <= size <= num_bytes * (1 + 1 / SIZES_PER_OCTAVE) + 1
    assert rounded(size) == size


def test_pages_are_used_again_once_no_copy_uses_them(host: Host) -> None:
    value = host.pages.take(SIZE)
    address = value.data_ptr()
    del value
    assert len(host.copies) == 1 and host.pages.idle_bytes == SIZE
    other = host.pages.take(SIZE)
    assert other.data_ptr() != address, "a copy may still read the first"
    host.copies[0].done = True
    assert host.pages.take(SIZE).data_ptr() == address
    assert host.sizes == [SIZE, SIZE]


def test_pages_that_were_used_last_come_first(host: Host) -> None:
    """However many others lie there from busier times."""
    values = [host.pages.take(SIZE) for _ in range(4)]
    while values:
        address = values.pop().data_ptr()
    for copies in host.copies:
        copies.done = True
    for _ in range(3):
        value = host.pages.take(SIZE)
        assert value.data_ptr() == address
        del value
        host.copies[-1].done = True


def test_views_keep_pages_whatever_became_of_the_buffer(host: Host) -> None:
    view = host.pages.take(SIZE).view(torch.bfloat16).as_strided((8, 4), (1, 8))[3:]
    gc.collect()
    assert not host.copies and host.pages.idle_bytes == 0
    detached = [view.detach()]
    del view
    assert not host.copies
    detached.clear()
    assert len(host.copies) == 1 and host.pages.idle_bytes == SIZE


def test_much_larger_pages_are_left_for_larger_values(host: Host) -> None:
    host.pages.take(SIZE)
    host.copies[0].done = True
    small = host.pages.take(SIZE // (LARGEST_FACTOR + 1))
    fitting = host.pages.take(SIZE // LARGEST_FACTOR)
    assert host.sizes == [SIZE, rounded(SIZE // (LARGEST_FACTOR + 1))]
    assert small.data_ptr() != fitting.data_ptr()


def test_pages_are_pinned_as_long_as_they_are_there(host: Host) -> None:
    value = host.pages.take(SIZE + 1)
    assert host.driver.covers(value) and list(host.driver.ranges.values()) == host.sizes == [rounded(SIZE + 1)]
    del value
    assert host.pages.release() == 0
    assert len(host.driver.ranges) == 1, "a copy may still use them"
    host.copies[0].done = True
    assert host.pages.release() == rounded(SIZE + 1)
    assert not host.driver.ranges and host.driver.gone == [True], "unpinned before they were given back"


def test_what_is_used_again_needs_no_room_of_the_host(host: Host) -> None:
    asked: list[int] = []

    def check(num_bytes: int) -> None:
        asked.append(num_bytes)
        if len(asked) > 1:
            raise HostMemoryError("full")

    host.pages.take(SIZE, check)
    host.copies[0].done = True
    kept = host.pages.take(SIZE, check)
    assert asked == [SIZE]
    with pytest.raises(HostMemoryError):
        host.pages.take(SIZE, check)
    assert host.sizes == [SIZE] and kept.numel() == SIZE


def test_values_come_and_go_in_several_threads(host: Host) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for size in range(1, 40):
            value = host.pages.take(size * PAGE)
            value.fill_(number)
            for copies in tuple(host.copies):
                copies.done = True
            if not bool((value == number).all()):
                wrong.append(size)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for copies in host.copies:
        copies.done = True
    assert not wrong and host.pages.idle_bytes == sum(host.driver.ranges.values())
    host.pages.release()
    assert not host.driver.ranges

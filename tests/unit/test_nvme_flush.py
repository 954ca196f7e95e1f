import errno
import threading

from fakes_nvme import Gate

from kvobj.tiers.nvme.flush import GroupFlush


class Outcomes:
    def __init__(self) -> None:
        self.seen: list[OSError | None] = []

    def __call__(self, error: OSError | None) -> None:
        self.seen.append(error)


def test_what_arrives_during_a_flush_shares_the_next_one() -> None:
    gate = Gate()
    flushes: list[int] = []
    outcomes = Outcomes()

    def flush() -> None:
        flushes.append(len(outcomes.seen))
        gate()

    group = GroupFlush(flush)
    leader = threading.Thread(target=group.request, args=(outcomes,), kwargs={"since": 0})
    leader.start()
    assert gate.reached.wait(10)
    for _ in range(5):
        group.request(outcomes, since=0)
    assert outcomes.seen == []
    gate.open()
    leader.join(10)
    assert outcomes.seen == [None] * 6
    assert flushes == [0, 1]


def test_after_a_failed_flush_none_is_tried_again() -> None:
    flushes: list[None] = []

    def flush() -> None:
        flushes.append(None)
        raise OSError(errno.EIO, "lost")

    group = GroupFlush(flush)
    outcomes = Outcomes()
    group.request(outcomes, since=0)
    group.request(outcomes, since=0)
    assert [error.errno for error in outcomes.seen if error] == [errno.EIO, errno.EIO]
    assert len(flushes) == 1
    assert group.failed is not None


def test_a_flush_after_a_flush_is_a_new_one() -> None:
    flushes: list[None] = []
    group = GroupFlush(lambda: flushes.append(None))
    outcomes = Outcomes()
    group.request(outcomes, since=0)
    group.request(outcomes, since=0)
    assert (outcomes.seen, len(flushes)) == ([None, None], 2)


def test_a_write_that_flushes_itself_is_the_one_flush_that_runs() -> None:
    flushes: list[None] = []
    group = GroupFlush(lambda: flushes.append(None))
    outcomes = Outcomes()
    assert group.begin_alone()
    assert not group.begin_alone()
    group.request(outcomes, since=0)
    assert not group.join(outcomes, since=0)
    assert (outcomes.seen, flushes) == ([], [])
    group.lead()
    assert (outcomes.seen, len(flushes)) == ([None, None], 1)
    assert group.begin_alone()


def test_after_a_write_that_could_not_flush_itself_nothing_is_flushed() -> None:
    flushes: list[None] = []
    group = GroupFlush(lambda: flushes.append(None))
    outcomes = Outcomes()
    assert group.begin_alone()
    group.request(outcomes, since=0)
    group.fail(OSError(errno.EIO, "lost"))
    group.lead()
    group.request(outcomes, since=0)
    assert [error.errno for error in outcomes.seen if error] == [errno.EIO, errno.EIO]
    assert not group.begin_alone()
    assert flushes == []


def test_what_was_begun_before_bytes_were_given_up_is_told_so_and_what_comes_later_is_flushed() -> None:
    flushes: list[None] = []
    group = GroupFlush(lambda: flushes.append(None))
    refused, flushed = Outcomes(), Outcomes()
    since = group.times_given_up
    assert group.begin_alone()
    group.request(refused, since=since)
    full = OSError(errno.ENOSPC, "full")
    group.give_up(full)
    group.lead()
    assert (refused.seen, flushes) == ([full], [])
    group.request(refused, since=since)
    assert (refused.seen, flushes) == ([full, full], [])
    group.request(flushed, since=group.times_given_up)
    assert (flushed.seen, len(flushes), group.failed) == ([None], 1, None)

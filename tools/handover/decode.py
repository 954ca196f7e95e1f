"""The decode process: takes a prompt's KV cache over, generates, and compares tokens and bits with a run of its own."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import cast

import torch

from handover.link import WAIT_SECONDS, Job, Link, Way, say
from handover.model import KvOfLayer, Transformer, generate, prompt_of
from kvobj.client import Event, KvClient, Namespace
from kvobj.errors import NoSuchNamespaceError

POLL_SECONDS = 0.002


class Received:
    """Layers as they come, of several chunks, by several threads; `layer` waits for all chunks of one."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._views: dict[tuple[int, int], memoryview] = {}
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self.first_at = 0.0
        """When layer 0 of all chunks was there, and so its attention began."""

    def add(self, layer: int, chunk: int, view: memoryview) -> None:
        """One layer of one chunk has come."""
        with self._changed:
            self._views[layer, chunk] = view
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """No more will come: who waits gets the error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what the hand-over failed with: of a chunk that is followed only its end says that the bytes were a chunk's."""
        if self._error is not None:
            raise self._error

    def layer(self, layer: int) -> KvOfLayer:
        """K and V of one layer, once they are there. Raises what the hand-over failed with."""
        shape, chunks = self._job.shape, range(self._job.chunks)
        with self._changed:
            there = self._changed.wait_for(
                lambda: self._error is not None or all((layer, chunk) in self._views for chunk in chunks), WAIT_SECONDS
            )
            if self._error is not None or not there:
                raise self._error or TimeoutError(f"layer {layer} did not come")
            views = [self._views[layer, chunk] for chunk in chunks]
        self.first_at = self.first_at or time.monotonic()
        sizes = (2, shape.kv_heads, shape.chunk_tokens, shape.head_dim)
        both = torch.cat([torch.frombuffer(view, dtype=torch.float32).view(sizes) for view in views], dim=2)
        return both[0], both[1]


def follow(way: Way, into: Received) -> None:
    """Follow every chunk while it is being put, a connection each: layers come as prefill makes them."""

    def one(chunk: int) -> None:
        try:
            layers = way.client.follow_chunk(
                way.ids[chunk], namespace=way.namespace, layers=(0, way.job.shape.layers - 1), wait_seconds=WAIT_SECONDS
            )
            for layer, view in enumerate(layers):
                way.link.carry(len(view))
                into.add(layer, chunk, view)
        except Exception as error:  # noqa: BLE001 - told to the thread that waits
            into.fail(error)

    in_parallel(one, len(way.ids))


def get_whole(way: Way, into: Received) -> None:
    """Read every chunk once it is stored, whole; attention begins when the last is there."""
    wait_for_chunks(way)
    chunks: list[memoryview] = []
    for name in way.ids:
        view = way.client.get_chunk(name, namespace=way.namespace)
        assert view is not None
        way.link.carry(len(view))
        chunks.append(view)
    size_bytes = way.job.shape.layer_bytes
    for chunk, view in enumerate(chunks):
        for layer in range(way.job.shape.layers):
            into.add(layer, chunk, view[layer * size_bytes : (layer + 1) * size_bytes])


def pull(way: Way, into: Received) -> None:
    """Ask what is stored, then for layer 0 of all chunks, layer 1 of all, and so on: attention begins with the first."""
    wait_for_chunks(way)
    for item in way.client.mget(way.ids, namespace=way.namespace, layer_order=True):
        assert item.data is not None
        assert item.layer is not None
        way.link.carry(len(item.data))
        into.add(item.layer, item.index, memoryview(item.data))


TAKE_OVER: dict[str, Callable[[Way, Received], None]] = {
    "push": follow,
    "whole": get_whole,
    "pull": pull,
    "shared": pull,
}


def wait_for_chunks(way: Way) -> None:
    """Return once the chain's last chunk is stored, and so all of them: the store's events tell of it, nobody has to ask."""
    last = way.ids[-1].hex()
    with closing(cast("Generator[Event]", way.client.events(follow=True))) as events:
        for event in events:
            if event.type == "stored" and last in event.ids:
                return


def in_parallel(work: Callable[[int], None], count: int) -> None:
    """`work` of each number below `count`, a thread each."""
    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def declared(client: KvClient, name: str) -> Namespace:
    """The namespace, once prefill has declared it."""
    give_up = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return client.namespace(name)
        except NoSuchNamespaceError:
            if time.monotonic() > give_up:
                raise
            time.sleep(POLL_SECONDS)


class Reference:
    """The same prompt without any hand-over: its cache, and the tokens that it makes."""

    def __init__(self, job: Job, model: Transformer) -> None:
        prompt = prompt_of(job.shape, job.chunks)
        self.cache: list[KvOfLayer] = []
        model.prefill(prompt[:-1], lambda _, kv: self.cache.append(kv))
        self.tokens, _ = generate(model, prompt[-1], len(prompt) - 1, job.tokens, self.cache.__getitem__)


def take_over(job: Job, model: Transformer, reference: Reference) -> dict[str, object]:
    """One hand-over and what came of it, in `time.monotonic`, which all processes of a machine share."""
    prompt = prompt_of(job.shape, job.chunks)
    with job.client(connections=job.chunks + 1) as client:
        begun = time.monotonic()
        namespace = declared(client, job.namespace)
        way = Way(job, client, namespace, namespace.chunk_ids(prompt[:-1]), Link(job.link_mib_s))
        received = Received(job)

        def take() -> None:
            try:
                TAKE_OVER[job.mode](way, received)
            except Exception as error:  # noqa: BLE001 - told to the thread that waits
                received.fail(error)

        taking = threading.Thread(target=take)
        taking.start()
        took: list[KvOfLayer] = []

        def cached(layer: int) -> KvOfLayer:
            took.append(received.layer(layer))
            return took[layer]

        tokens, times = generate(model, prompt[-1], len(prompt) - 1, job.tokens, cached)
        taking.join()
    received.check()
    same_bits = all(
        torch.equal(mine.view(torch.int32), theirs.contiguous().view(torch.int32))
        for mine, theirs in zip(flat(took), flat(reference.cache), strict=True)
    )
    return {
        "begun": begun,
        "first_layer": received.first_at,
        "first_token": times[0],
        "tokens": tokens,
        "same_tokens": tokens == reference.tokens,
        "same_bits": same_bits,
    }


def flat(cache: list[KvOfLayer]) -> Iterator[torch.Tensor]:
    """K and V of all layers, in order."""
    for key, value in cache:
        yield key.contiguous()
        yield value.contiguous()


def main() -> None:
    """Jobs from the standard input, until its end. The reference is made once: all jobs have the same prompt."""
    model: Transformer | None = None
    reference: Reference | None = None
    for line in sys.stdin:
        job = Job.parse(line)
        model = model or Transformer(job.shape)
        reference = reference or Reference(job, model)
        if job.mode == "warm":
            say(event="done", at=time.monotonic(), torch=torch.__version__)
            continue
        say(event="done", **take_over(job, model, reference))


if __name__ == "__main__":
    main()
    os._exit(0)  # torch's threads need not be waited for

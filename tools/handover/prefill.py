"""The prefill process: computes a prompt's KV cache once for each job that it is given, a line of JSON each, and hands it over."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time

import torch

from handover.link import Job, Link, Way, say
from handover.model import KvOfLayer, Transformer, prompt_of


def layers_of_chunks(kv: KvOfLayer, chunk_tokens: int) -> list[torch.Tensor]:
    """One layer's K and V of each chunk as its layout has them: `[kv, head, token, dim]`."""
    both = torch.stack(kv)
    return [part.contiguous() for part in both.split(chunk_tokens, dim=2)]


def push(way: Way, model: Transformer) -> None:
    """Each layer of each chunk is put as a part of its own while the next layers are computed."""
    job, ids = way.job, way.ids
    made: queue.Queue[tuple[int, list[torch.Tensor]] | None] = queue.Queue()

    def send() -> None:
        while (item := made.get()) is not None:
            layer, parts = item
            for index, part in enumerate(parts):
                way.link.carry(part.nbytes)
                way.client.put_part(
                    ids[index],
                    memoryview(part.numpy()).cast("B"),
                    part=(layer, job.shape.layers),
                    namespace=way.namespace,
                    parent=ids[index - 1] if index else "root",
                )
            if not layer:
                say(event="first layer sent", at=time.monotonic())

    sender = threading.Thread(target=send)
    sender.start()
    try:
        model.prefill(
            prompt_of(job.shape, job.chunks)[:-1],
            lambda layer, kv: made.put((layer, layers_of_chunks(kv, job.shape.chunk_tokens))),
        )
        say(event="computed", at=time.monotonic())
    finally:
        made.put(None)
        sender.join()


def put_whole(way: Way, model: Transformer) -> None:
    """Each chunk is put when all of it is there, which is when the last layer is."""
    job, ids = way.job, way.ids
    kept: list[list[torch.Tensor]] = []
    model.prefill(
        prompt_of(job.shape, job.chunks)[:-1],
        lambda _, kv: kept.append(layers_of_chunks(kv, job.shape.chunk_tokens)),
    )
    say(event="computed", at=time.monotonic())
    for index, name in enumerate(ids):
        chunk = torch.stack([parts[index] for parts in kept])
        way.link.carry(chunk.nbytes)
        way.client.put_chunk(
            name,
            memoryview(chunk.numpy()).cast("B"),
            namespace=way.namespace,
            parent=ids[index - 1] if index else "root",
        )


def main() -> None:
    """Jobs from the standard input, until its end. The model is made once, and warm before the first answer."""
    model: Transformer | None = None
    for line in sys.stdin:
        job = Job.parse(line)
        model = model or Transformer(job.shape)
        if job.mode == "warm":
            model.prefill(prompt_of(job.shape, job.chunks)[:-1], lambda *_: None)
            say(event="done", at=time.monotonic())
            continue
        with job.client(connections=2) as client:
            namespace = client.declare_namespace(job.namespace, job.shape.declaration(job.namespace))
            ids = namespace.chunk_ids(prompt_of(job.shape, job.chunks)[:-1])
            say(event="begun", at=time.monotonic())
            hand_over = push if job.mode == "push" else put_whole
            hand_over(Way(job, client, namespace, ids, Link(job.link_mib_s)), model)
        say(event="done", at=time.monotonic())


if __name__ == "__main__":
    main()
    os._exit(0)  # torch's threads need not be waited for

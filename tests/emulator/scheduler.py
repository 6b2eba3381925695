"""Partitions of a block as threads of which one runs at a time, in an order drawn at random; barriers; deadlocks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any


class DeadlockError(AssertionError):
    """Every partition waits, and nothing is under way that could let one go on."""


class Task:
    """One partition."""

    def __init__(self, name: str, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        self.name, self.error = name, None
        self.condition: Callable[[], bool] | None = None
        self.waits_for = ""
        self.baton = threading.Semaphore(0)
        self.done = False
        self.matmuls: list[Any] = []  # warpgroup_mma under way, oldest first
        self.stores: list[Callable[[], None]] = []  # TMA stores under way, oldest first
        self.copies: list[Callable[[], None]] = []  # cp.async under way
        self._call = (function, arguments)

    def body(self, scheduler: Scheduler) -> None:
        self.baton.acquire()
        try:
            if not scheduler.stopped:
                self._call[0](*self._call[1])
                scheduler.finish(self)
        except BaseException as error:
            self.error = error
        self.done = True
        scheduler.baton.release()


class Scheduler:
    """Runs the tasks of one block. `eager` is how often work under way is done at once rather than as late as can
    be; `starved` is the number of a task that goes on only where nothing else does."""

    def __init__(self, seed: int, eager: float, starved: int | None = None) -> None:
        self.random, self.eager, self.starved = random.Random(seed), eager, starved
        self.baton = threading.Semaphore(0)
        self.events: list[Callable[[], None]] = []  # TMA loads under way, in no order
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.stopped = False

    def run(self, functions: Sequence[tuple[Callable[..., Any], Sequence[Any]]]) -> None:
        self.tasks = [Task(f"{i}:{function.__name__}", function, args) for i, (function, args) in enumerate(functions)]
        threads = [threading.Thread(target=task.body, args=(self,), daemon=True) for task in self.tasks]
        for thread in threads:
            thread.start()
        try:
            self._loop()
        finally:
            self.stopped = True
            for task in self.tasks:
                if not task.done:
                    task.baton.release()
            for thread in threads:
                thread.join(10)
        for event in self.events:
            event()

    def _loop(self) -> None:
        starved = None if self.starved is None or self.starved >= len(self.tasks) else self.tasks[self.starved]
        while not all(task.done for task in self.tasks):
            if self.random.random() < self.eager:
                self._something_under_way()
            ready = [task for task in self.tasks if not task.done and (task.condition is None or task.condition())]
            others = [task for task in ready if task is not starved]
            if ready and not others and self._something_under_way():
                continue
            if ready:
                self.current = self.random.choice(others or ready)
                self.current.condition = None
                self.current.baton.release()
                self.baton.acquire()
                if self.current.error is not None:
                    raise self.current.error
            elif not self._something_under_way():
                states = [f"{task.name} waits for {task.waits_for}" for task in self.tasks if not task.done]
                raise DeadlockError("; ".join(states))

    def _something_under_way(self) -> bool:
        """Let one load land, one product or store be made; whether there was any."""
        choices: list[Callable[[], None]] = [lambda i=i: self.events.pop(i)() for i in range(len(self.events))]
        for task in self.tasks:
            choices += [lambda queue=queue: queue.pop(0)() for queue in (task.matmuls, task.stores) if queue]
        if choices:
            self.random.choice(choices)()
        return bool(choices)

    def pause(self, condition: Callable[[], bool] | None = None, waits_for: str = "") -> None:
        """Let others run, and go on once the condition holds."""
        task = self.current
        if task is None:  # before the partitions start there is nobody else
            assert condition is None or condition(), f"the kernel waits for {waits_for} before its partitions start"
            return
        task.condition, task.waits_for = condition, waits_for
        self.baton.release()
        task.baton.acquire()
        if self.stopped:
            raise SystemExit

    def finish(self, task: Task) -> None:
        """What a partition leaves under way at its end."""
        assert not task.matmuls, f"{task.name} ends with products under way"
        for store in task.stores:
            store()


class Barrier:
    """An mbarrier: a phase ends when as many have arrived as it counts, and all the bytes that it expects."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = 0
        self.phase = 0

    def arrive(self, count: int = 1) -> None:
        assert count <= self.pending, "more arrivals than the barrier counts"
        self.pending -= count
        self._check()

    def expect(self, size: int) -> None:
        self.bytes += size
        self.arrive()

    def land(self, size: int) -> None:
        self.bytes -= size
        assert self.bytes >= 0, "more bytes landed than the barrier expects"
        self._check()

    def _check(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.count


class NamedBarrier:
    """`bar.sync` and `bar.arrive` between two partitions of 128 threads."""

    def __init__(self) -> None:
        self.arrived: list[Task | None] = []
        self.generation = 0

    def arrive(self, who: Task | None) -> int:
        """The generation that ends once the other has arrived too."""
        mine = self.generation
        assert who not in self.arrived, "a partition arrives for both"
        self.arrived.append(who)
        if len(self.arrived) == 2:
            self.arrived, self.generation = [], mine + 1
        return mine

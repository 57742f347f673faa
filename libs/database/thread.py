"""A thread with one connection: runs transactions, repeats those that may be repeated."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from typing import Any

from libs.database.errors import DatabaseFault, fault_error
from libs.database.schema import Schema, apply_schema, read_version
from libs.database.transaction import SqlConnection, SqlDriver
from libs.database.work_queue import DatabaseWork, WorkQueue
from slipstream.errors import Internal, InvalidArgument, SlipstreamError
from slipstream.rpc.backoff import Backoff

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.01, 0.5
# A transaction that has lasted this long takes no further work of other callers.
GROUP_S = 0.02

log = logging.getLogger(__name__)


class DatabaseThread:
    """`run` is the body of the thread. `schemas` may grow meanwhile."""

    def __init__(
        self, driver: SqlDriver, queue: WorkQueue, schemas: Sequence[Schema], *, is_read_only: bool
    ) -> None:
        self._driver = driver
        self._queue = queue
        self._schemas = schemas
        self._is_read_only = is_read_only
        self._connection: SqlConnection | None = None
        self._applied = 0
        self._is_committing = False

    def run(self) -> None:
        """Serve until the queue is closed and empty."""
        # Reads share no commit, so that none waits for those after it.
        while works := self._queue.take(1 if self._is_read_only else self._driver.group_size):
            works = [work for work in works if work.begin()]
            if len(works) > 1:
                works = self._run_together(works)
            for work in works:
                self._run_alone(work)
        self._disconnect()

    # ---- one commit for several

    def _run_together(self, works: list[DatabaseWork]) -> list[DatabaseWork]:
        """Run work in one transaction, each in a savepoint. Returns what has to run alone.

        Beyond GROUP_S what is left waits again: another tenant's turn may be before it.
        """
        results: list[Any] = []
        try:
            connection = self._connect()
            connection.begin()
            end_s = time.monotonic() + GROUP_S
            for work in works:
                results.append(self._run_in_savepoint(connection, work))
                if time.monotonic() >= end_s:
                    break
            self._commit(connection)
        except self._driver.errors as error:
            n_run = len(results) + 1  # the last of them, or the commit, failed
            return self._after_fault(works[:n_run], error) + works[n_run:]
        except Exception:  # tables of a newer release, say: each fails by itself, and the thread goes on
            self._rollback()
            return works
        for work, result in zip(works, results, strict=False):
            _resolve(work, result)
        self._queue.put_back(works[len(results) :])
        return []

    def _run_in_savepoint(self, connection: SqlConnection, work: DatabaseWork) -> Any:
        """Run the work; an exception leaves nothing of it. Raises what the driver raises, too."""
        connection.execute("SAVEPOINT work")
        try:
            result = _run(work, connection)
        except self._driver.errors:
            raise
        except BaseException as error:
            connection.execute("ROLLBACK TO work")
            result = error
        connection.execute("RELEASE work")
        return result

    def _after_fault(self, works: list[DatabaseWork], error: Exception) -> list[DatabaseWork]:
        """Clean up; return what may run again."""
        if not self._abandon(error):
            return works
        for work in works:
            if not work.is_idempotent:
                work.future.set_exception(fault_error(DatabaseFault.LOST, may_have_committed=True))
        return [work for work in works if work.is_idempotent]

    # ---- one at a time

    def _run_alone(self, work: DatabaseWork) -> None:
        backoff = Backoff(first_s=_FIRST_RETRY_S, longest_s=_LONGEST_RETRY_S)
        while True:
            try:
                connection = self._connect()
                connection.begin()
                result = _run(work, connection)
                self._commit(connection)
            except self._driver.errors as error:
                pause_s = backoff.pause_s(random.random())
                failure = self._failure(work, error, next_try_s=time.monotonic() + pause_s)
                if failure is not None:
                    work.future.set_exception(failure)
                    return
                time.sleep(pause_s)
            except BaseException as error:
                self._rollback()
                work.future.set_exception(error)
                return
            else:
                work.future.set_result(result)
                return

    def _failure(self, work: DatabaseWork, error: Exception, *, next_try_s: float) -> SlipstreamError | None:
        """Clean up after a fault. The error that ends the work; None = it may run again."""
        fault = self._driver.fault_of(error)
        if fault is DatabaseFault.READ_ONLY and self._is_read_only:
            fault = DatabaseFault.DEFECT  # a reader that writes
        may_have_committed = self._abandon(error)
        if fault is DatabaseFault.DEFECT:
            log.error("the database refuses a statement: %s", error)
            return Internal("the database refuses a statement")
        if fault is DatabaseFault.VALUE:
            return InvalidArgument(
                "request", "has a text with a NUL character, which the database does not take"
            )
        may_repeat = fault in (DatabaseFault.BUSY, DatabaseFault.LOST) and (
            work.is_idempotent or not may_have_committed
        )
        if may_repeat and next_try_s < work.deadline_s:
            return None
        return fault_error(fault, may_have_committed=may_have_committed)

    # ---- the connection

    def _connect(self) -> SqlConnection:
        """The connection, with all schemas applied."""
        if self._connection is None:
            self._connection = self._driver.connect(is_read_only=self._is_read_only)
            self._applied = 0
        while self._applied < len(self._schemas):
            schema = self._schemas[self._applied]
            if not self._is_applied(self._connection, schema):
                self._apply(schema)
            self._applied += 1
        return self._connection

    def _is_applied(self, connection: SqlConnection, schema: Schema) -> bool:
        """Whether the tables are there. It takes no lock, so that a reader does not wait for writers."""
        connection.begin()
        try:
            return read_version(connection, schema) == len(schema.steps)
        except self._driver.errors as error:
            if self._driver.fault_of(error) is not DatabaseFault.DEFECT:
                raise
            return False  # not even the table of versions
        finally:
            connection.rollback()

    def _apply(self, schema: Schema) -> None:
        connection = self._driver.connect(is_read_only=False)
        try:
            connection.begin()
            apply_schema(connection, schema)
            connection.commit()
        finally:
            connection.close()

    def _commit(self, connection: SqlConnection) -> None:
        self._is_committing = True
        connection.commit()
        self._is_committing = False

    def _abandon(self, error: Exception) -> bool:
        """Undo the transaction after a fault; True where it may have been committed all the same."""
        is_lost = self._driver.fault_of(error) is DatabaseFault.LOST
        is_unknown, self._is_committing = self._is_committing and is_lost, False
        if is_lost:
            self._disconnect()
        else:
            self._rollback()
        return is_unknown

    def _rollback(self) -> None:
        if self._connection is not None:
            self._connection.rollback()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _run(work: DatabaseWork, connection: SqlConnection) -> Any:
    """Run the work in the open transaction. Raises DatabaseFull where it would take the last room."""
    if work.adds_content and connection.is_nearly_full():
        raise fault_error(DatabaseFault.FULL)
    return work.run(connection)


def _resolve(work: DatabaseWork, result: Any) -> None:
    if isinstance(result, BaseException):
        work.future.set_exception(result)
    else:
        work.future.set_result(result)

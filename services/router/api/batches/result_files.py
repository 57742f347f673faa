"""The output and the error file of a batch while they are written."""

from __future__ import annotations

import hashlib

from services.router.api.batches.file_store import FileStore, FileWriter, NewFile
from services.router.api.batches.records import FILE_PREFIX, RequestBatch, TokenTotals, new_id
from services.router.api.batches.results import ResultLines, add_tokens


class ResultFile:
    """A file of a batch's results, which exists once it has a line. Written again, it replaces itself."""

    def __init__(self, files: FileStore, batch: RequestBatch, kind: str) -> None:
        digest = hashlib.blake2b(f"{batch.id}/{kind}".encode(), digest_size=10).digest()
        self._files = files
        self._new = NewFile(
            batch.tenant,
            f"{batch.id}_{kind}.jsonl",
            "batch_output",
            id=new_id(FILE_PREFIX, batch.created_unix_s, digest),
            is_bounded=False,
        )
        self._ttl_s = batch.output_ttl_s
        self._writer: FileWriter | None = None

    async def append(self, data: bytes) -> None:
        """Add lines."""
        if not data:
            return
        if self._writer is None:
            self._writer = await self._files.begin(self._new)
        await self._writer.append(data)

    async def finish(self) -> str | None:
        """The file's id, if there is one."""
        return None if self._writer is None else (await self._writer.finish(ttl_s=self._ttl_s)).id


class ResultFiles:
    """Both files of a batch's results, and the sums over their lines."""

    def __init__(self, files: FileStore, batch: RequestBatch) -> None:
        self.output, self.errors = ResultFile(files, batch, "output"), ResultFile(files, batch, "error")
        self.tokens, self.model = TokenTotals(), ""
        self.n_jobs = self.n_completed = self.n_unfinished = 0

    async def append(self, lines: ResultLines) -> None:
        """Add lines to both files, and what they count to the sums."""
        await self.output.append(lines.output)
        await self.errors.append(lines.errors)
        self.tokens, self.model = add_tokens(self.tokens, lines.tokens), self.model or lines.model
        self.n_jobs += lines.n_jobs
        self.n_completed += lines.n_completed
        self.n_unfinished += lines.n_unfinished

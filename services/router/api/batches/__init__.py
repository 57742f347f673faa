"""OpenAI's files and batches: JSONL in, one answer a line out.

Lines run as jobs. The other APIs are not imported, except OpenAI's parsers.
"""

"""The `slipstream` command.

Must not import `libs`, `services` or `supervisor`.
"""


def main() -> None:
    """Entry point. Imports late: the SDK's users import this package's parent."""
    from slipstream.cli.app import run

    run()

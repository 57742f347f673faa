"""The `slipstream` command.

Must not import `libs`, `services` or `supervisor`.
"""


def main() -> None:
    """Entry point. Imports late: the SDK's users import this package's parent.

    Ctrl-C amid the imports ends it with exit code 130, as Typer does from then on.
    """
    try:
        from slipstream.cli.app import run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None

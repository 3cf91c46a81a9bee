"""The `octavo` command. One file a command; `app.py` puts them together."""


def main() -> None:
    """Entry point of the console script."""
    from octavo.cluster.cli.app import run

    run()

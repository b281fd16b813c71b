"""The bodies of the command line's subcommands. Each module is imported when its command runs; imports nothing here."""

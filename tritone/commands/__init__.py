"""The sub-commands of `tritone`, one file each: `add_parser(...)` declares its options, `run(arguments)` does it."""

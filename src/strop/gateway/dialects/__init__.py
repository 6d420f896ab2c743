"""The APIs that clients speak: each turns its JSON into an `engine.Request`, and answers into its JSON or its events."""

"""Process life: a head process, its workers, and the client that talks to it; see README.md. Imports nothing by itself."""

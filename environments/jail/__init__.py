"""What runs inside the sandbox: a program of the standard library alone, in an interpreter of its own.

`keeper` shuts itself in (`layers`) and forks one `worker` per run; a worker rewrites the source (`screen`) so that every
step of it is counted (`guards`, `library`). Nothing here imports the rest of the project: environments.sandbox starts it.
"""

"""Tasks made from files: a text is edited, quoted from, or goes on as it began."""

from distill.corpora.tasks.drawn import task_documents, task_prompts
from distill.corpora.tasks.task import KINDS, Task, TaskKind

__all__ = ["KINDS", "Task", "TaskKind", "task_documents", "task_prompts"]

"""Saves and loads from their beginning to their end. Every way to save or load a checkpoint goes through these sessions.

A session owns what was begun: it alone calls the core's begin, publish and abandon, and it undoes what was begun where it is left
by an error or an interrupt. Who uses a session decides which ranks take part (`ranks`) and what is written.

| session | for | used by |
| --- | --- | --- |
| `save.SaveSession` | a checkpoint that the coordinator begins and publishes | `Saver`, DCP's `finish`, `convert` |
| `moment.AsyncSaveSession` | a checkpoint of one moment, written by a thread beside training | `Saver.save_async` |
| `part.PartSession` | what one rank writes before any rank knows of a checkpoint | DCP's `write_data` and `stage` |
| `load.LoadSession` | a checkpoint that is read, and the tables whose rows it replaces | `Saver.load`, DCP's reader |
| `load.Merge` | a chain of checkpoints that is merged | `Saver.compact` |

Before any of them chooses what it writes, `sweep.sweep_before_save` lets the rows go that policies of eviction take at saves.
`Saver`, DCP's `stage` and `write_data`, and `BlockSaver` call it, each once in a save.

`references` notes which checkpoints files of other programs refer to, such as Lightning's, so that they stay as long as those.
"""

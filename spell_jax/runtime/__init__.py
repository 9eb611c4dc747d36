"""Runtime: processes, meshes, files, checkpoints and logs, for any program that runs JAX.

No module here knows what a policy, a document or an algorithm is.

Public names:
  mesh.make_mesh, mesh.shardings: the device mesh, and shardings of arrays by logical axes.
  hosts.distributed.join, hosts.distributed.broadcast: a run on several hosts.
  hosts.distributed.fail_together: an error on one host ends the work of all.
  hosts.preemption.Preemption: a signal that asks a run to save and end.
  files.checkpoint.Checkpoints: checkpoints of a run, written and restored to the bit.
  files.durable.write_file, files.durable.append: files that survive a loss of power.
  files.jsonl.read_records, files.jsonl.write_records: rows, one JSON object a line.
  files.paths.open_folder, files.remote.fetch: folders here or in a bucket, and files of any URL.
  log.run_logger.RunLogger, log.metrics.Metrics: what a run tells about itself.
  endpoint.Endpoint: a client of an OpenAI-compatible API, with retries and a rate limit.
  config.Config, config.section, config.build: fields of a dataclass as flags and back.
  hooks.load: the function that a field names as MODULE:FUNCTION.
  entry.run_main, setup.setup: the frame of a command, and jax's settings.

Must not import: any other room.
"""

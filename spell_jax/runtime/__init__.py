"""Runtime: processes, meshes, files, checkpoints and logs, for any program that runs JAX.

No module here knows what a policy, a document or an algorithm is.

Public names:
  mesh.make_mesh, mesh.shardings: the device mesh, and shardings of arrays by logical axes.
  distributed.join, distributed.broadcast, distributed.fail_together: a run on several hosts.
  checkpoint.Checkpoints: checkpoints of a run, written and restored to the bit.
  durable.write_file, durable.append, durable.replace: files that survive a loss of power.
  jsonl.read_records, jsonl.write_records, jsonl.read_json, jsonl.write_json: rows and documents.
  paths.open_folder, remote.fetch: folders here or in a bucket, and files of any URL.
  endpoint.Endpoint: a client of an OpenAI-compatible API, with retries and a rate limit.
  config.Config, config.section, config.build: fields of a dataclass as flags and back.
  hooks.load: the function that a field names as MODULE:FUNCTION.
  entry.run_main, setup.setup: the frame of a command, and jax's settings.
  run_logger.RunLogger, metrics.Metrics, progress.Progress: what a run tells about itself.
  preemption.Preemption: a signal that asks a run to save and end.

Must not import: any other room.
"""

# Runs in the home folder of a TPU worker. tpu_vm.py sends this file with each call, followed by a
# line that calls install, start or report. Each of them ends by printing a line that marks success.
#
# spell_jax/      code        spell_jax_venv/  its Python
# spell_jax_run/  log, command, pid, status (once the command has exited), and lock, which is held
#                 while the command runs; unlike a pid file it cannot go stale.
set -eu
cd
mkdir -p spell_jax_run

succeeded() { echo "spell_jax_worker $(hostname) $*"; }
fail() { echo "$(hostname): $*" >&2; exit 1; }
take_lock() { exec 9>>spell_jax_run/lock; flock -w 1 9 || fail "$*"; }

install() {
  take_lock "cannot install: a command is running: $(cat spell_jax_run/command)"
  rm -rf spell_jax.new
  mkdir spell_jax.new
  tar -xzf spell_jax.tar.gz -C spell_jax.new
  rm -rf spell_jax
  mv spell_jax.new spell_jax
  python3 -m pip install --quiet --user uv
  [ -x spell_jax_venv/bin/python ] || python3 -m uv venv --quiet --python=3.11 spell_jax_venv
  python3 -m uv pip install --quiet --python=spell_jax_venv/bin/python \
    -e './spell_jax[tpu,gcs,judge,tfds]'
  succeeded installed
}

start() { # $1: arguments of Python, quoted for a shell
  [ -x spell_jax_venv/bin/python ] || fail "no code is installed; run copy first"
  take_lock "a command is running already: $(cat spell_jax_run/command)"
  rm -f spell_jax_run/status
  printf %s "$1" >spell_jax_run/command
  cd spell_jax
  export -f python_to_its_end
  setsid nohup bash -c python_to_its_end >>../spell_jax_run/log 2>&1 </dev/null &
  succeeded started
}

python_to_its_end() {
  # At shutdown every process gets a SIGTERM. This shell must outlive the trainer to write its exit
  # status. The trap is `:` because the trainer would inherit an empty one.
  trap : TERM
  echo $$ >../spell_jax_run/pid
  export PYTHONUNBUFFERED=1
  eval "../spell_jax_venv/bin/python $(cat ../spell_jax_run/command)"
  echo $? >../spell_jax_run/status.new
  mv ../spell_jax_run/status.new ../spell_jax_run/status
}

report() {
  cd spell_jax_run
  # The lock is tested before status is read, because status is written before it is released.
  if flock -n -s lock true; then state=idle; else state=running; fi
  [ ! -e status ] || state=exited:$(cat status)
  succeeded "$state $(cat command 2>/dev/null | tr '\n' ' ')"
}

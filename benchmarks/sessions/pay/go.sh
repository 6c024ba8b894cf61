# On the host, in a copy of this repository, once all but the model is in /tmp/p: unpacks and installs it, begins the
# jobs, and makes the model of the pieces that appear in /tmp/m. /tmp/queue/end says when the host is gone. WHEELS: the
# folder of packages in what is unpacked (/tmp/in).
set -euo pipefail
export TREE=$PWD
host=benchmarks/offline_host.sh model=/tmp/models/qwen25-coder-1.5b
bash $host unpack /tmp/in /tmp/p/a?
mkdir -p $model /tmp/m
tar xJf /tmp/in/model.tar.xz -C $model
bash $host begin "$(bash $host left)" benchmarks/sessions/pay
bash $host install "${WHEELS:-/tmp/in}"
touch /tmp/site/installed
exec bash $host run python3 benchmarks/sessions/pay/arrive.py /tmp/m 1117320768 $model

# On the host, in a copy of this repository, once all but the model is in /tmp/p: begins the jobs, unpacks and installs
# what they wait for, and makes the model of the pieces that appear in /tmp/m. /tmp/queue/end says when the host is gone.
# WHEELS: the folder of packages in what is unpacked (/tmp/in).
set -euo pipefail
host=benchmarks/offline_host.sh model=/tmp/models/qwen25-coder-1.5b
bash $host begin "$(bash $host left)" benchmarks/sessions/pay
cd "${COPY:-/tmp/tree}" # the first copy may be replaced
export TREE=$PWD
bash $host unpack /tmp/in /tmp/p/a?
mkdir -p $model /tmp/m
tar xJf /tmp/in/model.tar.xz -C $model
bash $host install "${WHEELS:-/tmp/in}"
touch /tmp/site/installed
exec bash $host run python3 benchmarks/sessions/pay/arrive.py /tmp/m 1117320768 $model

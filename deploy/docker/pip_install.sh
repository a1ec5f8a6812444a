#!/bin/sh
# pip install inside an image build, with what the build was given: secrets pip_conf (a pip.conf) and
# ca_bundle (certificates); both may be absent or empty.
set -eu
if [ -s /run/secrets/pip_conf ]; then
    export PIP_CONFIG_FILE=/run/secrets/pip_conf
fi
if [ -s /run/secrets/ca_bundle ]; then
    export PIP_CERT=/run/secrets/ca_bundle
fi
exec /opt/venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check --no-input "$@"

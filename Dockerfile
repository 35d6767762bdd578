# docker build -t sigcam .                                                                         runs on the CPU
# docker build -t sigcam:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .     runs on GPUs
# docker run --rm -v "$PWD:/work" sigcam explain photo.jpg
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY pyproject.toml MANIFEST.in README.md CHANGELOG.md CITATION.cff LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=embedded,report,examples,hub
# Both of one index: builds for the CPU and for CUDA do not mix. Their versions are the latest that are there.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir torch torchvision --index-url "$TORCH_INDEX"
COPY --from=build /wheels /wheels
# hadolint ignore=DL3013
RUN wheel="$(echo /wheels/sigcam-*.whl)" && pip install --no-cache-dir "${wheel}[${EXTRAS}]"
# With `docker run --user` another user's files are written, who keeps caches in the same home.
RUN useradd --create-home --uid 1000 sigcam && chmod 1777 /home/sigcam && install --directory --owner sigcam /work
ENV HOME=/home/sigcam
USER 1000
WORKDIR /work
ENTRYPOINT ["sigcam"]
CMD ["--help"]

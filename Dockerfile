# An image with mingle, torch and examples/ddp_train.py. docs/containers.md tells how to use it and what to change.
#
# No syntax line, no RUN --mount: the builder of Docker 20.10 must do, and no image but the base is pulled.

# Needs Python 3.10 or newer with pip or ensurepip, and no compiler.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build

ENV PATH=/opt/venv/bin:$PATH \
    PIP_CONSTRAINT=/build/constraints.txt \
    PIP_BUILD_CONSTRAINT=/build/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_FIND_LINKS=/build/wheelhouse \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /build

# More options for pip, such as the index to take torch from.
ARG PIP_ARGS=

# The build of torch: cpu is a tenth of the size of the one for CUDA. Where the index has no such build (nor wheelhouse/
# a wheel of it), or this is empty, the index's own choice is taken.
ARG TORCH_BUILD=cpu

# What mingle and the example run on, in a layer that a change of their code leaves alone. Compiled here, on all cores,
# because the user of the final image may not write beside the sources; some files of torch are for a newer Python and
# fail, as under pip. wheelhouse/ may be missing, so that it comes together with a file that is there. tools/netifaces
# needs no compiler.
COPY constraints.txt ./
COPY tools/netifaces/ tools/netifaces/
COPY constraints.txt wheelhouse* wheelhouse/
RUN python3 -m venv /opt/venv \
    && torch="$(sed -n '/^torch==/p' constraints.txt)" \
    && { { [ -n "${TORCH_BUILD}" ] && pip install ${PIP_ARGS} --no-compile "${torch}+${TORCH_BUILD}"; } \
        || pip install ${PIP_ARGS} --no-compile "${torch}"; } \
    && pip install ${PIP_ARGS} --no-compile ./tools/netifaces click msgspec multicast_expert numpy rich \
    && cd /opt/venv/lib/python3*/site-packages \
    && find . -type d -name tests -prune -exec rm -rf {} + \
    && { python -m compileall -qq -j 0 . || true; }

COPY README.md LICENSE pyproject.toml ./
COPY tools/hatch_build.py tools/
COPY src/ src/
RUN pip wheel ${PIP_ARGS} --no-deps --wheel-dir /dist .

FROM ${BASE_IMAGE}

# A crash in native code tells where Python was.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONFAULTHANDLER=1 \
    PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 1000 mingle
COPY --from=build /opt/venv /opt/venv
COPY --from=build /dist /dist
RUN pip install --no-cache-dir --no-deps --no-index --disable-pip-version-check /dist/*.whl

WORKDIR /home/mingle
COPY examples/ddp_train.py ./
USER mingle
CMD ["python", "ddp_train.py"]

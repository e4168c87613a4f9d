# The `sublet` command in an image: for `sublet metrics` as a sidecar, and for commands from other containers of a node.
#   cargo xtask wheel && docker build --tag sublet:0.1.0 .
# A job's own image installs the wheel instead: the library must be where the job's processes are.
FROM python:3.12-slim-bookworm

COPY target/wheels/*.whl /wheels/
RUN pip install --no-cache-dir --no-index /wheels/*.whl \
    && rm -r /wheels \
    && useradd --uid 1000 --create-home sublet

# What NVIDIA's container toolkit puts in: the driver's library, and the one that the GPUs' own figures come from.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

USER 1000:1000
HEALTHCHECK --interval=60s --timeout=30s CMD ["sublet", "doctor"]
ENTRYPOINT ["sublet"]
CMD ["doctor"]

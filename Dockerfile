# syntax=docker/dockerfile:1
# Two images from one build: `--target edge` and `--target node`.
FROM rust:1.95.0-bookworm AS build
# The image's own toolchain, without the formatter and linter that rust-toolchain.toml asks for.
ENV RUSTUP_TOOLCHAIN=1.95.0
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --release --locked --bin iop-edge --bin iop-node \
 && mkdir /out \
 && cp target/release/iop-edge target/release/iop-node /out/

FROM debian:bookworm-slim AS runtime
# Providers and edges behind TLS are verified against the system's authorities.
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates \
 && rm -rf /var/lib/apt/lists/* \
 && mkdir -p /var/lib/iop /etc/iop \
 && chown 10001:10001 /var/lib/iop
USER 10001:10001
WORKDIR /var/lib/iop
# SIGTERM drains: streams finish, new requests are refused.
STOPSIGNAL SIGTERM

FROM runtime AS edge
COPY --from=build /out/iop-edge /usr/local/bin/iop-edge
EXPOSE 8080 7070 9090
ENTRYPOINT ["/usr/local/bin/iop-edge"]

FROM runtime AS node
COPY --from=build /out/iop-node /usr/local/bin/iop-node
EXPOSE 9091
ENTRYPOINT ["/usr/local/bin/iop-node"]

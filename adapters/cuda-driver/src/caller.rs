//! The library that a call comes from, by its file name.

use std::sync::{Mutex, PoisonError};

/// The label of NCCL's own memory.
pub const NCCL: &str = "nccl";

/// The label of PyTorch's memory.
pub const TORCH: &str = "torch";

/// Labels by the start of the file name; the first that fits counts. The calls of the shared CUDA runtime and of PyTorch's own
/// libraries are PyTorch's in a process that has it. NCCL has one file: libraries built on it (`libnccl_ep`, `libnccl-net-...`)
/// request memory of their own, which is paused as any other.
const LABELS: &[(&str, &str)] = &[
    ("libnccl.so", NCCL),
    ("libcublas", "cublas"),
    ("libcudnn", "cudnn"),
    ("libcusparse", "cusparse"),
    ("libcusolver", "cusolver"),
    ("libcufft", "cufft"),
    ("libnvshmem", "nvshmem"),
    ("libc10", TORCH),
    ("libtorch", TORCH),
    ("libcudart", "cudart"),
];

/// The most libraries that one process is expected to name; more share one label.
const NAMES_MAX: usize = 64;

/// Returns the label of a library from its path. With `torch_is_loaded`, calls of the shared CUDA runtime count as PyTorch's,
/// which makes almost all of them.
pub fn label(path: &str, torch_is_loaded: bool) -> &'static str {
    let name = path.rsplit('/').next().unwrap_or(path);
    let known = LABELS.iter().find(|(start, _)| name.starts_with(start));
    match known {
        Some((_, "cudart")) if torch_is_loaded => TORCH,
        Some((_, label)) => label,
        None if name.starts_with("libnccl") => {
            other(name.trim_start_matches("lib").split(".so").next().unwrap_or(name))
        }
        None => other(name),
    }
}

/// Returns the name of a library without a label of ours. It is kept once, for the life of the process.
fn other(name: &str) -> &'static str {
    static NAMES: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(kept) = names.iter().find(|kept| **kept == name) {
        return kept;
    }
    if names.len() >= NAMES_MAX {
        return "other";
    }
    let kept: &'static str = Box::leak(name.to_owned().into_boxed_str());
    names.push(kept);
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_get_their_labels() {
        assert_eq!(label("/x/nvidia/nccl/lib/libnccl.so.2", true), NCCL);
        assert_eq!(label("/x/libcudart.so.13", true), TORCH);
        assert_eq!(label("/x/libcudart.so.13", false), "cudart");
        assert_eq!(label("/x/libcublasLt.so.13", true), "cublas");
        assert_eq!(label("/opt/app", true), "app");
        assert_eq!(label("/opt/app", true), "app");
    }

    #[test]
    fn what_is_built_on_nccl_has_labels_of_its_own() {
        assert_eq!(label("/x/libnccl.so", false), NCCL);
        assert_eq!(label("/x/libnccl_ep.so.0", false), "nccl_ep");
        assert_eq!(label("/x/libnccl_m2n.so", false), "nccl_m2n");
        assert_eq!(label("/opt/hpcx/libnccl-net.so", false), "nccl-net");
        assert_eq!(label("/opt/libnccl-net-ofi.so.1.2", false), "nccl-net-ofi");
    }
}

//! Compiles the C programs that the tests run; `Files` says where they are.

use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const COMMON: [&str; 5] = ["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wno-unused-function"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=programs");
    println!("cargo::rerun-if-changed=simcuda/programs/driver.h");
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo gives no OUT_DIR")?);
    for folder in ["nccl-like", "simnccl", "simnvml"] {
        fs::create_dir_all(out.join(folder))?;
    }
    let library = |source: &str, target: &str, libraries: &[&str]| {
        let name = Path::new(target).file_name().unwrap_or_default().to_string_lossy();
        let soname = format!("-Wl,-soname,{name}");
        compile(source, &out.join(target), &["-shared", "-fPIC", &soname], libraries)
    };
    // The names must be NCCL's and NVML's: they are how callers are told apart.
    compile("nccl_like", &out.join("nccl-like/libnccl.so.2"), &["-shared", "-fPIC"], &["-ldl"])?;
    library("simnccl", "simnccl/libnccl.so.2", &["-ldl"])?;
    let nccl = out.join("simnccl/libnccl.so.2");
    let nccl = nccl.to_str().ok_or("OUT_DIR is not UTF-8")?;
    library("simnccl_ep", "simnccl/libnccl_ep.so.0", &[nccl])?;
    let experts = out.join("simnccl/libnccl_ep.so.0");
    let experts = experts.to_str().ok_or("OUT_DIR is not UTF-8")?;
    library("simnvml", "simnvml/libnvidia-ml.so.1", &["-ldl"])?;
    for name in ["rank", "devices", "handmade", "wander", "family", "turns", "hoard", "kept"] {
        compile(name, &out.join(name), &["-pthread"], &["-ldl"])?;
    }
    compile("spmd", &out.join("spmd"), &["-pthread"], &[experts, nccl, "-ldl"])?;
    println!("cargo::rustc-env=SUBLET_PLATFORM={}", env::var("TARGET")?);
    Ok(())
}

fn compile(
    source: &str,
    target: &Path,
    flags: &[&str],
    libraries: &[&str],
) -> Result<(), Box<dyn Error>> {
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let status = Command::new(&compiler)
        .args(COMMON)
        .args(flags)
        .arg("-o")
        .arg(target)
        .arg(format!("programs/{source}.c"))
        .args(libraries)
        .status()
        .map_err(|error| {
            format!("no C compiler ({compiler}: {error}); install one, such as gcc")
        })?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{compiler} could not compile {source}").into())
    }
}

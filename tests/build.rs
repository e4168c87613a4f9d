//! Compiles the C programs that the tests run.

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
    let rank = out.join("rank");
    compile("programs/rank.c", &rank, &["-pthread"], &["-ldl"])?;
    // The name must be NCCL's: it is how callers are told apart.
    let nccl_like = out.join("nccl-like/libnccl.so.2");
    fs::create_dir_all(out.join("nccl-like"))?;
    compile("programs/nccl_like.c", &nccl_like, &["-shared", "-fPIC"], &[])?;
    let nccl_dir = out.join("simnccl");
    fs::create_dir_all(&nccl_dir)?;
    let nccl = nccl_dir.join("libnccl.so.2");
    let soname = ["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2"];
    compile("programs/simnccl.c", &nccl, &soname, &["-ldl"])?;
    let spmd = out.join("spmd");
    let nccl_name = nccl.to_str().ok_or("OUT_DIR is not UTF-8")?;
    let experts = nccl_dir.join("libnccl_ep.so.0");
    let soname = ["-shared", "-fPIC", "-Wl,-soname,libnccl_ep.so.0"];
    compile("programs/simnccl_ep.c", &experts, &soname, &[nccl_name])?;
    let experts_name = experts.to_str().ok_or("OUT_DIR is not UTF-8")?;
    compile("programs/spmd.c", &spmd, &["-pthread"], &[experts_name, nccl_name, "-ldl"])?;
    let platform = env::var("TARGET")?;
    println!("cargo::rustc-env=SUBLET_PLATFORM={platform}");
    let devices = out.join("devices");
    compile("programs/devices.c", &devices, &[], &["-ldl"])?;
    println!("cargo::rustc-env=SUBLET_DEVICES_PROGRAM={}", devices.display());
    let handmade = out.join("handmade");
    compile("programs/handmade.c", &handmade, &["-pthread"], &["-ldl"])?;
    println!("cargo::rustc-env=SUBLET_HANDMADE_PROGRAM={}", handmade.display());
    let preposted = out.join("preposted");
    compile("programs/preposted.c", &preposted, &[], &["-ldl"])?;
    println!("cargo::rustc-env=SUBLET_PREPOSTED_PROGRAM={}", preposted.display());
    let wander = out.join("wander");
    compile("programs/wander.c", &wander, &[], &["-ldl"])?;
    println!("cargo::rustc-env=SUBLET_WANDER_PROGRAM={}", wander.display());
    let family = out.join("family");
    compile("programs/family.c", &family, &[], &["-ldl"])?;
    println!("cargo::rustc-env=SUBLET_FAMILY_PROGRAM={}", family.display());
    let turns = out.join("turns");
    compile("programs/turns.c", &turns, &[], &["-ldl"])?;
    println!("cargo::rustc-env=SUBLET_TURNS_PROGRAM={}", turns.display());
    let nvml_dir = out.join("simnvml");
    fs::create_dir_all(&nvml_dir)?;
    let soname = ["-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"];
    compile("programs/simnvml.c", &nvml_dir.join("libnvidia-ml.so.1"), &soname, &[])?;
    println!("cargo::rustc-env=SUBLET_SIMNVML_DIR={}", nvml_dir.display());
    let hoard = out.join("hoard");
    compile("programs/hoard.c", &hoard, &[], &["-ldl"])?;
    println!("cargo::rustc-env=SUBLET_HOARD_PROGRAM={}", hoard.display());
    println!("cargo::rustc-env=SUBLET_RANK_PROGRAM={}", rank.display());
    println!("cargo::rustc-env=SUBLET_SIMNCCL_DIR={}", nccl_dir.display());
    println!("cargo::rustc-env=SUBLET_SPMD_PROGRAM={}", spmd.display());
    println!("cargo::rustc-env=SUBLET_NCCL_LIKE_LIBRARY={}", nccl_like.display());
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
        .arg(source)
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

//! Keeps `libsublet.so` loaded: its threads run, and its functions are in others' tables, until the process
//! ends, whatever `dlclose` is asked for.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}

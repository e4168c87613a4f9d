//! Keeps `libsublet.so` loaded: its threads run, and its functions are in others' tables, until the process
//! ends, whatever `dlclose` is called with. Has it mean its own functions by the names that it exports: where it
//! is opened late, the loader would bind them to the C library's and the driver's. And names it in itself: a
//! library that needs `libsublet.so` then gets the one that is preloaded, wherever it lies, and no second copy
//! is loaded.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libsublet.so");
}

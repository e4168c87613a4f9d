//! Names the library as programs ask for it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // Worker threads and exit handlers live in the library, so it must stay.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // As the driver does, it gives its own functions out, even if others replace them.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}

//! The real driver, loaded at run time. (Written next.)

/// Placeholder.
#[derive(Debug)]
pub struct CudaDriver;
/// Placeholder.
#[derive(Debug)]
pub struct LoadError;
/// Placeholder.
#[derive(Debug)]
pub struct RealSymbol;

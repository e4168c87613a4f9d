//! The one direction of dependencies: `vmm-pool -> tenants -> adapters/* -> ffi`, and what stands beside.

use std::path::Path;

use cargo_metadata::DependencyKind;

use super::{Finding, path_text};
use crate::Outcome;
use crate::workspace::Workspace;

const LICENSE: &str = "Apache-2.0";

/// The place of a crate, by its folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layer {
    Pool,
    Tenants,
    Adapter,
    Ffi,
    Python,
    Cli,
    SimulatedDriver,
    /// What tests of other crates stand on.
    Stage,
    Tests,
    Xtask,
}

impl Layer {
    fn of(folder: &str) -> Option<Self> {
        match folder {
            "vmm-pool" => Some(Self::Pool),
            "tenants" => Some(Self::Tenants),
            "ffi" => Some(Self::Ffi),
            "ffi/python" => Some(Self::Python),
            "tenants/cli" => Some(Self::Cli),
            "tests/simcuda" => Some(Self::SimulatedDriver),
            "tests/stage" => Some(Self::Stage),
            "tests" | "tests/loom" => Some(Self::Tests),
            "xtask" => Some(Self::Xtask),
            _ if folder.starts_with("adapters/") => Some(Self::Adapter),
            _ => None,
        }
    }

    /// The layers that this one may use.
    fn may_use(self) -> &'static [Layer] {
        match self {
            // Python finds the C interface at run time, in the library that holds the memory.
            Self::Pool | Self::Python | Self::Xtask => &[],
            Self::Tenants | Self::SimulatedDriver => &[Self::Pool],
            // Not each other: what two adapters share belongs to the left of both.
            Self::Adapter | Self::Cli | Self::Stage => &[Self::Pool, Self::Tenants],
            Self::Ffi => &[Self::Pool, Self::Tenants, Self::Adapter],
            Self::Tests => &[
                Self::Pool,
                Self::Tenants,
                Self::Adapter,
                Self::Ffi,
                Self::Cli,
                Self::SimulatedDriver,
                Self::Stage,
            ],
        }
    }
}

/// Findings about the edges between our crates, and about their licence.
pub(crate) fn check(workspace: &Workspace) -> Outcome<Vec<Finding>> {
    let folder = |manifest: &Path| -> Outcome<String> {
        let folder = manifest.parent().ok_or("a manifest has no folder")?;
        Ok(path_text(folder.strip_prefix(&workspace.root)?))
    };
    let mut findings = Vec::new();
    for package in workspace.metadata.workspace_packages() {
        let from = folder(package.manifest_path.as_std_path())?;
        let manifest = format!("{from}/Cargo.toml");
        if package.license.as_deref() != Some(LICENSE) {
            let next = "add `license.workspace = true`";
            findings.push(Finding::new(&manifest, 1, "has no licence of ours", next));
        }
        for dependency in &package.dependencies {
            // A dependency with a path is ours. One on the crate itself turns a feature on for its tests.
            let Some(path) = &dependency.path else {
                continue;
            };
            let to = path_text(path.as_std_path().strip_prefix(&workspace.root)?);
            // Tests stand on the stage, but for those of the pool, which know no tenant.
            let for_tests = dependency.kind == DependencyKind::Development;
            if for_tests && Layer::of(&to) == Some(Layer::Stage) && from != "vmm-pool" {
                continue;
            }
            findings.extend(edge(&from, &to));
        }
    }
    Ok(findings)
}

/// What is wrong with the crate in the folder `from` using the one in `to`.
fn edge(from: &str, to: &str) -> Option<Finding> {
    let manifest = format!("{from}/Cargo.toml");
    if from == to {
        return None;
    }
    let place = |folder| {
        Layer::of(folder).ok_or_else(|| {
            let what = format!("{folder} has no place in the layers");
            Finding::new(&manifest, 1, what, "give it one in xtask/src/tidy/layers.rs")
        })
    };
    let (user, used) = match (place(from), place(to)) {
        (Ok(user), Ok(used)) => (user, used),
        (Err(finding), _) | (_, Err(finding)) => return Some(finding),
    };
    if user.may_use().contains(&used) {
        return None;
    }
    let what = format!("wrong edge: {from} uses {to}");
    let next = "move the shared part to the left (vmm-pool -> tenants -> adapters -> ffi)";
    Some(Finding::new(&manifest, 1, what, next))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edges_to_the_left_are_fine() {
        for (from, to) in [
            ("tenants", "vmm-pool"),
            ("adapters/nccl", "tenants"),
            ("ffi", "adapters/cuda-graph"),
            ("ffi", "adapters/cuda-driver"),
            ("tenants/cli", "tenants"),
            ("tests", "ffi"),
            ("tests", "tests/stage"),
            ("vmm-pool", "vmm-pool"),
        ] {
            assert_eq!(edge(from, to), None, "{from} -> {to}");
        }
    }

    #[test]
    fn wrong_edges_are_named() {
        for (from, to) in [
            ("vmm-pool", "tenants"),
            ("tenants", "adapters/nccl"),
            ("adapters/nccl", "adapters/cuda-driver"),
            ("adapters/torch-allocator", "adapters/cuda-driver"),
            ("adapters/nccl", "ffi"),
            ("tenants/cli", "adapters/nccl"),
            ("tests/simcuda", "tenants"),
            ("tests/stage", "adapters/nccl"),
            ("tenants", "tests/stage"),
            ("ffi/python", "ffi"),
            ("xtask", "vmm-pool"),
        ] {
            let finding = edge(from, to).expect("a wrong edge").to_string();
            assert!(finding.contains(&format!("{from} uses {to}")), "{finding}");
        }
    }

    #[test]
    fn crate_without_a_place_is_found() {
        let finding = edge("new-crate", "vmm-pool").unwrap().to_string();
        assert!(finding.contains("new-crate has no place"), "{finding}");
    }
}

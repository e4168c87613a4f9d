//! Families of tenants: tenants may open each other's device memory if their processes name the same family.
//!
//! Their pauses stay separate: two tenants share no cut, no lock and no frozen moment. So references are not traced across
//! tenants. Memory is *lent*, on a lease that ends with its last use (`vmm-pool/src/ledger/tickets.rs`).
//!
//! Both sides must name the family. The owner decides, and relies on the importer's statement about itself. Processes of one
//! user trust each other's word, as they could read each other's memory anyway (`docs/security.md`).

use crate::identity::{FamilyName, TenantName};

/// The tenant of a process, and the family that it names, if any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing<'a> {
    /// Its tenant.
    pub tenant: &'a TenantName,
    /// The family that the process names.
    pub family: Option<&'a FamilyName>,
}

/// The reason why a process of one tenant may not open memory of another tenant.
#[expect(missing_docs, reason = "messages name what the fields are")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FamilyRefusal {
    /// Two tenants share memory only if both name one family, and neither does. The memory was not opened. Start both
    /// with the same `--family NAME`.
    #[error(
        "the memory is of tenant '{lender}', and tenant '{borrower}' may not open it: start both with one family \
         (sublet run --family NAME, or SUBLET_FAMILY), or run both in one tenant"
    )]
    NoFamily { lender: TenantName, borrower: TenantName },
    /// Two tenants share memory only if both name one family, and one of them names none. The memory was not opened.
    /// Start the other with the same `--family NAME`.
    #[error(
        "the memory is of tenant '{lender}', and tenant '{borrower}' may not open it: only '{named_by}' names family \
         '{family}'; start '{missing}' with it too (sublet run --tenant {missing} --family {family}, or SUBLET_FAMILY)"
    )]
    OneSided {
        lender: TenantName,
        borrower: TenantName,
        named_by: TenantName,
        missing: TenantName,
        family: FamilyName,
    },
    /// The two tenants name different families. The memory was not opened. Start both with the same `--family NAME`.
    #[error(
        "the memory is of tenant '{lender}' in family '{lenders}', and tenant '{borrower}' in family '{borrowers}' may \
         not open it: start both with the same --family"
    )]
    Differ { lender: TenantName, lenders: FamilyName, borrower: TenantName, borrowers: FamilyName },
}

/// May `borrower`, a process of another tenant, open memory of `lender`?
///
/// # Errors
/// [`FamilyRefusal`], which names both tenants and the missing setting.
pub fn admit(lender: Standing<'_>, borrower: Standing<'_>) -> Result<(), FamilyRefusal> {
    let tenants = || (lender.tenant.clone(), borrower.tenant.clone());
    let one_sided = |named_by: &TenantName, missing: &TenantName, family: &FamilyName| {
        let (lender, borrower) = tenants();
        let (named_by, missing, family) = (named_by.clone(), missing.clone(), family.clone());
        Err(FamilyRefusal::OneSided { lender, borrower, named_by, missing, family })
    };
    match (lender.family, borrower.family) {
        (Some(ours), Some(theirs)) if ours == theirs => Ok(()),
        (Some(ours), Some(theirs)) => {
            let ((lender, borrower), (lenders, borrowers)) =
                (tenants(), (ours.clone(), theirs.clone()));
            Err(FamilyRefusal::Differ { lender, lenders, borrower, borrowers })
        }
        (Some(family), None) => one_sided(lender.tenant, borrower.tenant, family),
        (None, Some(family)) => one_sided(borrower.tenant, lender.tenant, family),
        (None, None) => {
            let (lender, borrower) = tenants();
            Err(FamilyRefusal::NoFamily { lender, borrower })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decided(lenders: Option<&str>, borrowers: Option<&str>) -> Result<(), String> {
        let tenants = ["train", "infer"].map(|name| TenantName::new(name).unwrap());
        let families =
            [lenders, borrowers].map(|name| name.map(|name| FamilyName::new(name).unwrap()));
        let standing =
            |side: usize| Standing { tenant: &tenants[side], family: families[side].as_ref() };
        admit(standing(0), standing(1)).map_err(|refusal| refusal.to_string())
    }

    #[test]
    fn both_sides_must_name_one_family() {
        assert_eq!(decided(Some("rl"), Some("rl")), Ok(()));
        for (lenders, borrowers) in [
            (None, None),
            (Some("rl"), None),
            (None, Some("rl")),
            (Some("rl"), Some("RL")),
            (Some("rl"), Some("rl2")),
        ] {
            let refused = decided(lenders, borrowers).unwrap_err();
            assert!(refused.contains("'train'") && refused.contains("'infer'"), "{refused}");
            assert!(refused.contains("--family"), "{refused}");
        }
    }

    #[test]
    fn a_family_named_by_one_side_only_is_asked_of_the_other() {
        let refused = decided(Some("rl"), None).unwrap_err();
        assert!(refused.contains("sublet run --tenant infer --family rl"), "{refused}");
        let refused = decided(None, Some("rl")).unwrap_err();
        assert!(refused.contains("sublet run --tenant train --family rl"), "{refused}");
        let refused = decided(Some("a"), Some("b")).unwrap_err();
        assert!(refused.contains("family 'a'") && refused.contains("family 'b'"), "{refused}");
    }

    #[test]
    fn what_is_no_tenants_name_is_no_familys_either() {
        for name in ["", ".hidden", "a/b", "a b", "r\u{e9}", &"x".repeat(41)] {
            let error = FamilyName::new(name).unwrap_err().to_string();
            assert!(error.contains("is no family's name"), "{error}");
        }
        assert_eq!(FamilyName::new("rl-1.b_2").unwrap().as_str(), "rl-1.b_2");
    }
}

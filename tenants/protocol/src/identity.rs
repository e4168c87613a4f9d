//! Names and identities of tenants and their processes.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use vmm_pool::PeerId;

/// Longest tenant name, in bytes: it becomes a directory name inside a socket path of 107 bytes.
pub const TENANT_NAME_BYTES_MAX: usize = 40;

/// The name of a tenant (`--tenant`) or family (`--family`) has letters that are not allowed. Nothing was started or
/// changed. Give another name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{given}' is no {what}: use 1 to {TENANT_NAME_BYTES_MAX} letters, digits, '.', '_' or '-', \
     not starting with '.'"
)]
pub struct NameError {
    what: &'static str,
    given: String,
}

macro_rules! names {
    ($($(#[$doc:meta])* $name:ident: $what:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(String);

        impl $name {
            /// Checks `name`.
            ///
            /// # Errors
            /// [`NameError`] when it is empty, too long, starts with a dot or holds another character.
            pub fn new(name: &str) -> Result<Self, NameError> {
                let refused = || NameError { what: $what, given: name.chars().take(60).collect() };
                is_name(name).then(|| Self(name.to_owned())).ok_or_else(refused)
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )*};
}

names! {
    /// The name of a tenant: 1 to 40 of `a-z A-Z 0-9 . _ -`, not starting with a dot.
    TenantName: "tenant name";
    /// The name of a family: tenants that may open each other's device memory. The rules of a tenant's name hold.
    FamilyName: "family's name";
}

fn is_name(name: &str) -> bool {
    let fits = (1..=TENANT_NAME_BYTES_MAX).contains(&name.len());
    let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    fits && plain && !name.starts_with('.')
}

/// The random identity of one process in a tenant. Process ids are not unique across namespaces.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MemberId(#[cfg_attr(feature = "schema", schemars(with = "String"))] pub u64);

impl Serialize for MemberId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        id_text::serialize(&self.0, serializer)
    }
}

impl<'de> Deserialize<'de> for MemberId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        id_text::deserialize(deserializer).map(Self)
    }
}

/// Numbers that name something. In text for people's programs, which may have shorter numbers, they are 16 hexadecimal digits;
/// on the wire they are numbers.
pub(crate) mod id_text {
    use serde::de::Error as _;
    use serde::{Deserialize as _, Deserializer, Serializer};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde calls")]
    pub(crate) fn serialize<S: Serializer>(id: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(&format_args!("{id:016x}"))
        } else {
            serializer.serialize_u64(*id)
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        if !deserializer.is_human_readable() {
            return u64::deserialize(deserializer);
        }
        let text = String::deserialize(deserializer)?;
        u64::from_str_radix(&text, 16).map_err(D::Error::custom)
    }
}

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<MemberId> for PeerId {
    fn from(id: MemberId) -> Self {
        Self(id.0)
    }
}

impl From<PeerId> for MemberId {
    fn from(id: PeerId) -> Self {
        Self(id.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_leave_the_directory_are_refused() {
        for name in ["", ".", "..", ".hidden", "a/b", "a b", "ä", &"x".repeat(41)] {
            assert!(TenantName::new(name).is_err(), "{name:?} was accepted");
        }
        for name in ["train", "a.b-c_D9", &"x".repeat(40)] {
            assert!(TenantName::new(name).is_ok(), "{name:?} was refused");
        }
    }

    #[test]
    fn identities_are_text_for_programs_and_numbers_on_the_wire() {
        let id = MemberId(u64::MAX - 1);
        let text = serde_json::to_string(&id).unwrap();
        assert_eq!(text, "\"fffffffffffffffe\"");
        assert_eq!(serde_json::from_str::<MemberId>(&text).unwrap(), id);
        assert!(serde_json::from_str::<MemberId>("\"x\"").is_err());
        assert_eq!(postcard::to_stdvec(&id).unwrap(), postcard::to_stdvec(&id.0).unwrap());
    }
}

//! libmlx5: memory that is registered directly with cards of this maker.

#![expect(unsafe_code, reason = "exports functions under the library's names")]

use super::{found, nothing};
use sublet_interpose::interpose_library;
use sublet_interpose::library::{Description, Library};

/// libmlx5, and its known copies in this process.
pub(crate) static MLX5: Library = Library::new(Description {
    prefix: "mlx5dv_",
    landmark: c"mlx5dv_query_device",
    file: c"libmlx5.so.1",
    table: TABLE,
    found,
});

interpose_library! {
    MLX5; missing = super::nothing;
    replaced in calls {
        mlx5dv_devx_umem_dereg;
        mlx5dv_devx_umem_reg;
        mlx5dv_devx_umem_reg_ex;
    }
}

/// The functions instead of the library's.
mod calls {
    use std::ffi::c_int;

    use sublet_registrations::Key;

    use super::super::{ended, made};
    use super::{Function, MLX5};
    use sublet_interpose::{Pointer, instead_of};

    /// The beginning of `mlx5dv_devx_umem_in`, which newer libraries extend at its end.
    #[repr(C)]
    pub(super) struct UmemIn {
        address: Pointer,
        length: usize,
    }

    instead_of! {
        MLX5, missing = std::ptr::null_mut();
        mlx5dv_devx_umem_reg(
            context: Pointer, address: Pointer, length: usize, access: u32
        ) -> Pointer, |own| made(address, length, own, Key::UserMemory);
        mlx5dv_devx_umem_reg_ex(context: Pointer, memory: *const UmemIn) -> Pointer, |own| {
            // SAFETY: the caller's structure, which the library reads too; null is refused by it.
            let memory = unsafe { memory.as_ref() };
            memory.map_or_else(own, |memory| made(memory.address, memory.length, own, Key::UserMemory))
        };
    }

    instead_of! {
        MLX5, missing = libc::ENOSYS;
        mlx5dv_devx_umem_dereg(memory: Pointer) -> c_int,
            |own| ended(Key::UserMemory(memory.addr()), own);
    }
}

//! Finds and loads the stores' libraries.
#![allow(unsafe_code)]

use libloading::Library;

use crate::Missing;

/// Load a library that `make rivals` has found or fetched. The environment variable `LD_LIBRARY_PATH` names its folder.
pub(crate) fn load(name: &str) -> Result<Library, Missing> {
    // SAFETY: the code that RocksDB's and LMDB's libraries run when they are loaded touches nothing of this program.
    unsafe { Library::new(name) }.map_err(|error| format!("{error}; `make rivals` says why it is not there"))
}

/// Declares the functions of a library that are used, each with the signature of the library's header.
macro_rules! calls {
    ($prefix:literal, $(fn $name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        #[allow(non_snake_case)]
        pub(super) struct Calls {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            _library: libloading::Library,
        }

        impl Calls {
            pub(super) fn of(library: libloading::Library) -> Result<Self, crate::Missing> {
                // SAFETY: the signature is that of the header, and the library lives as long as the functions taken from it.
                unsafe {
                    Ok(Self {
                        $($name: *library
                            .get(concat!($prefix, stringify!($name), "\0").as_bytes())
                            .map_err(|error| error.to_string())?,)*
                        _library: library,
                    })
                }
            }
        }
    };
}
pub(crate) use calls;

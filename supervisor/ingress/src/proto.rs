//! The messages and services that the build generates from the protocol's definition.

use serde::Serializer;

tonic::include_proto!("inference");

pub(crate) mod health {
    tonic::include_proto!("grpc.health.v1");
}

pub(crate) mod reflection {
    tonic::include_proto!("grpc.reflection.v1");
}

/// Serializes a datatype for HTTP, where it has the name in the protocol's definition.
fn serialize_data_type<S: Serializer>(data_type: &i32, serializer: S) -> Result<S::Ok, S::Error> {
    let known = DataType::try_from(*data_type).unwrap_or_default();
    serializer.serialize_str(known.as_str_name())
}

//! Reads the keys `tenants` and `tenant_header`.

use std::num::NonZeroU32;
use std::time::Duration;

use http::HeaderName;

use super::reader::{Fields, Value};
use super::{Context, Peers, peers};

/// The name of the tenant to which all other requests belong.
pub const DEFAULT_TENANT: &str = "default";

/// The longest name of a tenant, in bytes. Metrics contain the names.
const MAX_NAME_BYTES: usize = 64;

/// The maximum number of tenants besides the default tenant.
const MAX_CONFIGURED: usize = 63;

/// The tenants, which divide the SM time.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TenantsConfig {
    /// The tenants in the order of the document. The list is empty if all requests belong to one tenant.
    pub list: Vec<TenantConfig>,
    /// The header in which trusted proxies name the tenant of a request.
    pub header: Option<TenantHeader>,
}

/// A tenant, to which the requests of some clients belong.
#[derive(Debug, Clone, PartialEq)]
pub struct TenantConfig {
    /// The unique name.
    pub name: String,
    /// The part of the SM time, relative to the other tenants.
    pub weight: f64,
    /// The maximum rate of requests, or `None` for no limit.
    pub rate: Option<RequestRate>,
    /// The maximum number of requests in flight, or `None` for no limit.
    pub in_flight: Option<u32>,
    /// The clients, or `None` for the user and the client with the tenant's name.
    pub members: Option<Peers>,
}

/// A rate of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestRate {
    /// The number of requests.
    pub requests: NonZeroU32,
    /// The time in which as many requests may arrive.
    pub per: Duration,
}

/// The header in which trusted proxies name the tenant of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantHeader {
    /// The name of the header.
    pub name: HeaderName,
    /// The proxies.
    pub trusted: Peers,
}

pub(super) fn tenants(fields: &Fields<'_>, context: &Context<'_>) -> TenantsConfig {
    let mut list = Vec::new();
    for (name, value) in fields.get("tenants").iter().flat_map(Value::any_fields) {
        if name.is_empty() || name.len() > MAX_NAME_BYTES {
            value.fault(format!("a tenant's name must have 1 to {MAX_NAME_BYTES} bytes"));
        }
        list.push(tenant(name, &value, context));
    }
    if let Some(value) = fields.get("tenants").filter(|_| list.len() > MAX_CONFIGURED) {
        value.fault(format!("{} tenants; use at most {MAX_CONFIGURED}", list.len()));
    }
    let header = fields.optional("tenant_header", |value| header(value, context));
    if list.is_empty()
        && let Some(value) = fields.get("tenant_header")
    {
        value.fault("no request has a tenant; add `tenants`");
    }
    TenantsConfig { list, header }
}

fn tenant(name: &str, value: &Value<'_>, context: &Context<'_>) -> TenantConfig {
    let fields = value.fields();
    let members = peers::peers(&fields, context);
    if let Some(members) = members.as_ref().filter(|_| name == DEFAULT_TENANT) {
        let list = if members.users.is_empty() { "clients" } else { "users" };
        fields.fault(
            list,
            "the default tenant has the requests of all clients without a tenant; remove this list",
        );
    }
    TenantConfig {
        name: name.to_owned(),
        weight: fields.read("weight", |value| value.number()),
        rate: fields.optional("rate", |value| value.parsed(rate)),
        in_flight: fields.optional("in_flight", Value::whole),
        members,
    }
}

fn header(value: &Value<'_>, context: &Context<'_>) -> Option<TenantHeader> {
    let fields = value.fields();
    let name = fields.required("name", "give the header's name, for example `x-tenant`");
    let parse = |text: &str| {
        text.to_ascii_lowercase().parse().map_err(|_| format!("`{text}` is not the name of a header"))
    };
    let trusted = peers::peers(&fields, context);
    if trusted.is_none() && value.is_map() {
        fields
            .fault("clients", "give the proxies that may set the header, in `users`, `groups` or `clients`");
    }
    Some(TenantHeader { name: name?.parsed(parse)?, trusted: trusted? })
}

/// Parses a rate such as `500/s`.
fn rate(text: &str) -> Result<RequestRate, String> {
    let bad = || format!("invalid rate `{text}`; use for example 500/s, 60/m or 1000/h");
    let (requests, unit) = text.split_once('/').ok_or_else(bad)?;
    let per = match unit.trim() {
        "s" => Duration::from_secs(1),
        "m" => Duration::from_mins(1),
        "h" => Duration::from_hours(1),
        _ => return Err(bad()),
    };
    let requests = requests.trim().parse().map_err(|_| bad())?;
    Ok(RequestRate { requests, per })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_a_number_and_a_unit() {
        let parsed = rate(" 500 / s").unwrap();
        assert_eq!((parsed.requests.get(), parsed.per), (500, Duration::from_secs(1)));
        assert_eq!(rate("7/h").unwrap().per, Duration::from_hours(1));
        for bad in ["500", "0/s", "-1/s", "5/d", "1.5/s", "/s", "99999999999/s", "5/s/s"] {
            assert!(rate(bad).unwrap_err().contains("500/s"), "{bad}");
        }
    }
}

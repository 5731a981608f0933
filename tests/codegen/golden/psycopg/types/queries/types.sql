-- name: EchoBoolean :one
select sqlc.narg(value)::boolean as value;

-- name: EchoBooleanArray :one
select sqlc.narg(value)::boolean[] as value;

-- name: EchoSmallint :one
select sqlc.narg(value)::smallint as value;

-- name: EchoSmallintArray :one
select sqlc.narg(value)::smallint[] as value;

-- name: EchoInteger :one
select sqlc.narg(value)::integer as value;

-- name: EchoIntegerArray :one
select sqlc.narg(value)::integer[] as value;

-- name: EchoBigint :one
select sqlc.narg(value)::bigint as value;

-- name: EchoBigintArray :one
select sqlc.narg(value)::bigint[] as value;

-- name: EchoReal :one
select sqlc.narg(value)::real as value;

-- name: EchoRealArray :one
select sqlc.narg(value)::real[] as value;

-- name: EchoDoublePrecision :one
select sqlc.narg(value)::double precision as value;

-- name: EchoDoublePrecisionArray :one
select sqlc.narg(value)::double precision[] as value;

-- name: EchoNumeric :one
select sqlc.narg(value)::numeric as value;

-- name: EchoNumericArray :one
select sqlc.narg(value)::numeric[] as value;

-- name: EchoNumeric102 :one
select sqlc.narg(value)::numeric(10,2) as value;

-- name: EchoNumeric102Array :one
select sqlc.narg(value)::numeric(10,2)[] as value;

-- name: EchoText :one
select sqlc.narg(value)::text as value;

-- name: EchoTextArray :one
select sqlc.narg(value)::text[] as value;

-- name: EchoVarchar40 :one
select sqlc.narg(value)::varchar(40) as value;

-- name: EchoVarchar40Array :one
select sqlc.narg(value)::varchar(40)[] as value;

-- name: EchoCharacter3 :one
select sqlc.narg(value)::character(3) as value;

-- name: EchoCharacter3Array :one
select sqlc.narg(value)::character(3)[] as value;

-- name: EchoName :one
select sqlc.narg(value)::name as value;

-- name: EchoNameArray :one
select sqlc.narg(value)::name[] as value;

-- name: EchoBytea :one
select sqlc.narg(value)::bytea as value;

-- name: EchoByteaArray :one
select sqlc.narg(value)::bytea[] as value;

-- name: EchoUuid :one
select sqlc.narg(value)::uuid as value;

-- name: EchoUuidArray :one
select sqlc.narg(value)::uuid[] as value;

-- name: EchoJsonb :one
select sqlc.narg(value)::jsonb as value;

-- name: EchoJsonbArray :one
select sqlc.narg(value)::jsonb[] as value;

-- name: EchoJson :one
select sqlc.narg(value)::json as value;

-- name: EchoJsonArray :one
select sqlc.narg(value)::json[] as value;

-- name: EchoDate :one
select sqlc.narg(value)::date as value;

-- name: EchoDateArray :one
select sqlc.narg(value)::date[] as value;

-- name: EchoTime :one
select sqlc.narg(value)::time as value;

-- name: EchoTimeArray :one
select sqlc.narg(value)::time[] as value;

-- name: EchoTimetz :one
select sqlc.narg(value)::timetz as value;

-- name: EchoTimetzArray :one
select sqlc.narg(value)::timetz[] as value;

-- name: EchoTimestamp :one
select sqlc.narg(value)::timestamp as value;

-- name: EchoTimestampArray :one
select sqlc.narg(value)::timestamp[] as value;

-- name: EchoTimestamptz :one
select sqlc.narg(value)::timestamptz as value;

-- name: EchoTimestamptzArray :one
select sqlc.narg(value)::timestamptz[] as value;

-- name: EchoInterval :one
select sqlc.narg(value)::interval as value;

-- name: EchoIntervalArray :one
select sqlc.narg(value)::interval[] as value;

-- name: EchoInet :one
select sqlc.narg(value)::inet as value;

-- name: EchoInetArray :one
select sqlc.narg(value)::inet[] as value;

-- name: EchoCidr :one
select sqlc.narg(value)::cidr as value;

-- name: EchoCidrArray :one
select sqlc.narg(value)::cidr[] as value;

-- name: EchoMacaddr :one
select sqlc.narg(value)::macaddr as value;

-- name: EchoMacaddrArray :one
select sqlc.narg(value)::macaddr[] as value;

-- name: EchoMacaddr8 :one
select sqlc.narg(value)::macaddr8 as value;

-- name: EchoMacaddr8Array :one
select sqlc.narg(value)::macaddr8[] as value;

-- name: EchoBit4 :one
select sqlc.narg(value)::bit(4) as value;

-- name: EchoBit4Array :one
select sqlc.narg(value)::bit(4)[] as value;

-- name: EchoBitVarying :one
select sqlc.narg(value)::bit varying as value;

-- name: EchoBitVaryingArray :one
select sqlc.narg(value)::bit varying[] as value;

-- name: EchoMoney :one
select sqlc.narg(value)::money as value;

-- name: EchoMoneyArray :one
select sqlc.narg(value)::money[] as value;

-- name: EchoOid :one
select sqlc.narg(value)::oid as value;

-- name: EchoOidArray :one
select sqlc.narg(value)::oid[] as value;

-- name: EchoPgLsn :one
select sqlc.narg(value)::pg_lsn as value;

-- name: EchoPgLsnArray :one
select sqlc.narg(value)::pg_lsn[] as value;

-- name: EchoPoint :one
select sqlc.narg(value)::point as value;

-- name: EchoPointArray :one
select sqlc.narg(value)::point[] as value;

-- name: EchoTsvector :one
select sqlc.narg(value)::tsvector as value;

-- name: EchoTsvectorArray :one
select sqlc.narg(value)::tsvector[] as value;

-- name: EchoInt4range :one
select sqlc.narg(value)::int4range as value;

-- name: EchoInt4rangeArray :one
select sqlc.narg(value)::int4range[] as value;

-- name: EchoInt8range :one
select sqlc.narg(value)::int8range as value;

-- name: EchoInt8rangeArray :one
select sqlc.narg(value)::int8range[] as value;

-- name: EchoNumrange :one
select sqlc.narg(value)::numrange as value;

-- name: EchoNumrangeArray :one
select sqlc.narg(value)::numrange[] as value;

-- name: EchoDaterange :one
select sqlc.narg(value)::daterange as value;

-- name: EchoDaterangeArray :one
select sqlc.narg(value)::daterange[] as value;

-- name: EchoTsrange :one
select sqlc.narg(value)::tsrange as value;

-- name: EchoTsrangeArray :one
select sqlc.narg(value)::tsrange[] as value;

-- name: EchoTstzrange :one
select sqlc.narg(value)::tstzrange as value;

-- name: EchoTstzrangeArray :one
select sqlc.narg(value)::tstzrange[] as value;

-- name: EchoInt4multirange :one
select sqlc.narg(value)::int4multirange as value;

-- name: EchoInt4multirangeArray :one
select sqlc.narg(value)::int4multirange[] as value;

-- name: EchoTstzmultirange :one
select sqlc.narg(value)::tstzmultirange as value;

-- name: EchoTstzmultirangeArray :one
select sqlc.narg(value)::tstzmultirange[] as value;

-- name: EchoMood :one
select sqlc.narg(value)::mood as value;

-- name: EchoMoodArray :one
select sqlc.narg(value)::mood[] as value;

-- name: EchoAppMood :one
select sqlc.narg(value)::app.mood as value;

-- name: EchoAppMoodArray :one
select sqlc.narg(value)::app.mood[] as value;

-- name: EchoPositive :one
select sqlc.narg(value)::positive as value;

-- name: EchoPositiveArray :one
select sqlc.narg(value)::positive[] as value;

-- name: EchoEmail :one
select sqlc.narg(value)::email as value;

-- name: EchoEmailArray :one
select sqlc.narg(value)::email[] as value;

-- name: EchoTagList :one
select sqlc.narg(value)::tag_list as value;

-- name: EchoFeeling :one
select sqlc.narg(value)::feeling as value;

-- name: EchoFeelingArray :one
select sqlc.narg(value)::feeling[] as value;

-- name: EchoFloatrange :one
select sqlc.narg(value)::floatrange as value;

-- name: EchoFloatrangeArray :one
select sqlc.narg(value)::floatrange[] as value;

-- name: EchoFloatmultirange :one
select sqlc.narg(value)::floatmultirange as value;

-- name: EchoFloatmultirangeArray :one
select sqlc.narg(value)::floatmultirange[] as value;

-- name: EchoPoint3 :one
select sqlc.narg(value)::point3 as value;

-- name: EchoPoint3Array :one
select sqlc.narg(value)::point3[] as value;

-- name: EchoBox3 :one
select sqlc.narg(value)::box3 as value;

-- name: EchoBox3Array :one
select sqlc.narg(value)::box3[] as value;

// The mean V of what was not attended to, in a partial on its way out: alpha * sum + (1 - alpha) * l * mean.
// Four elements a cycle; without `enable` all goes by as it is.
`default_nettype none
module mean_mix #(parameter D = 128, parameter G = 1) (
    input  wire            clk,
    input  wire            rst,
    input  wire            start,              // of a job, before its mean
    input  wire            enable,
    input  wire            mean_valid,         // beats of the mean, fp32
    input  wire [511:0]    mean_data,
    input  wire [32*G-1:0] alpha,
    input  wire [32*G-1:0] rest,               // 1 - alpha
    input  wire [32*G-1:0] total,              // l, there with the first beat
    input  wire            in_valid,
    output wire            in_ready,
    input  wire            in_last,            // maxima and totals: they stay
    input  wire [511:0]    in_data,
    output wire            out_valid,
    input  wire            out_ready,
    output wire            out_last,
    output wire [511:0]    out_data
);
    localparam MEANS = D / 16;
    localparam LM = $clog2(MEANS);
    localparam PLACES = 4;
    reg [511:0] means [0:MEANS-1];
    reg [LM:0] means_in;
    always @(posedge clk) begin
        if (mean_valid) means[means_in[LM-1:0]] <= mean_data;
        means_in <= rst || start ? 0 : means_in + mean_valid;
    end

    // (1 - alpha) * l of each head.
    reg [3:0] share_head, share_back;
    reg share_valid;
    reg [31:0] share_a, share_b;
    wire share_done;
    wire [31:0] share_y;
    reg [31:0] shares [0:G-1];
    wire shares_there = share_back == G;
    zkf_mul #(.WEXP(8), .WMAN(24), .STAGE_PRODUCT(1), .STAGE_PACK(1), .STAGE_OUTPUT(1)) share(.clk(clk), .rst(rst),
        .in_valid(share_valid), .a(share_a), .b(share_b), .out_valid(share_done), .y(share_y));
    always @(posedge clk) begin
        share_valid <= 0;
        if (rst || start) begin
            share_head <= 0;
            share_back <= 0;
        end else begin
            if (enable && in_valid && share_head != G) begin
                share_head <= share_head + 4'd1;
                share_valid <= 1;
                share_a <= rest[32*share_head +: 32];
                share_b <= total[32*share_head +: 32];
            end
            if (share_done) begin
                shares[share_back] <= share_y;
                share_back <= share_back + 4'd1;
            end
        end
    end

    // Beats, a quarter a cycle.
    reg [2:0] flying;                          // beats on their way
    reg [3:0] head;
    reg [LM-1:0] row;
    reg [511:0] held, held_mean;
    reg [31:0] held_alpha, held_share;
    reg [2:0] quarters;                        // left of the one that is held
    wire accept = enable && in_valid && !in_last && shares_there && flying < PLACES && quarters <= 1;
    reg [1:0] put, got;
    reg [2:0] filled;
    wire pop = filled != 0 && out_ready;
    assign in_ready = enable ? accept || (in_last && flying == 0 && out_ready) : out_ready;
    assign out_valid = enable ? filled != 0 || (in_valid && in_last && flying == 0) : in_valid;
    assign out_last = enable ? filled == 0 && in_last : in_last;
    always @(posedge clk)
        if (rst || start) begin
            flying <= 0;
            quarters <= 0;
            head <= 0;
            row <= 0;
        end else begin
            flying <= flying + accept - pop;
            if (accept) begin
                held <= in_data;
                held_mean <= means[row];
                held_alpha <= alpha[32*head +: 32];
                held_share <= shares[head];
                quarters <= 4;
                row <= row == MEANS - 1 ? 0 : row + 1'b1;
                if (row == MEANS - 1) head <= head + 4'd1;
            end else begin
                quarters <= quarters - (quarters != 0);
                held <= held >> 128;
                held_mean <= held_mean >> 128;
            end
        end

    wire [3:0] lane_valid;
    wire [127:0] lanes;
    genvar i;
    generate for (i = 0; i < 4; i = i + 1) begin : lane
        wire product_valid;
        wire [31:0] product;
        reg [31:0] x1, x2, x3, x4, a1, a2, a3, a4;
        always @(posedge clk) begin
            x1 <= held[32*i +: 32];
            x2 <= x1;
            x3 <= x2;
            x4 <= x3;
            a1 <= held_alpha;
            a2 <= a1;
            a3 <= a2;
            a4 <= a3;
        end
        zkf_mul #(.WEXP(8), .WMAN(24), .STAGE_PRODUCT(1), .STAGE_PACK(1), .STAGE_OUTPUT(1), .LATENCY(4)) of_mean(
            .clk(clk), .rst(rst || start), .in_valid(quarters != 0), .a(held_share), .b(held_mean[32*i +: 32]),
            .out_valid(product_valid), .y(product));
        zkf_fma #(.WEXP(8), .WMAN(24), .STAGE_PRODUCT(1), .STAGE_NORMALIZE(1), .STAGE_OUTPUT(1), .LATENCY(8)) of_sum(
            .clk(clk), .rst(rst || start), .in_valid(product_valid), .a(x4), .b(a4), .c(product),
            .out_valid(lane_valid[i]), .y(lanes[32*i +: 32]));
    end endgenerate

    // Beats again, which wait here.
    reg [511:0] waiting [0:PLACES-1];
    reg [383:0] earlier;
    reg [1:0] lane_quarter;
    wire put_now = lane_valid[0] && lane_quarter == 3;
    assign out_data = enable && filled != 0 ? waiting[got] : in_data;
    always @(posedge clk) begin
        if (lane_valid[0]) earlier <= {lanes, earlier[383:128]};
        if (put_now) waiting[put] <= {lanes, earlier};
        if (rst || start) begin
            lane_quarter <= 0;
            put <= 0;
            got <= 0;
            filled <= 0;
        end else begin
            lane_quarter <= lane_quarter + lane_valid[0];
            put <= put + put_now;
            got <= got + pop;
            filled <= filled + put_now - pop;
        end
    end
endmodule
`default_nettype wire
